"""Ray Train over servers beside its workers: `TorchTrainer(train, torch_config=DmltrainConfig(), ...)`.

Ray makes the process group before it calls the script's function, so the backend is registered in Ray's workers first.
The servers start and end with the group (docs/torch-distributed.md#with-torchrun).
"""

from dataclasses import dataclass as _dataclass
from typing import Any as _Any

import ray as _ray
from ray.train.torch import TorchConfig as _TorchConfig

import dmltrain.torch as _registers  # noqa: F401  (in a worker of Ray, which imports this module for _begin)
from dmltrain.backends.torch import process_group as _process_group

_LEAVE_SECONDS = 10.0  # for the workers of a job that has failed to leave it


def _begin() -> None:
    """In a worker, before its group is made."""


class _Backend(_TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: _Any, backend_config: _Any) -> None:
        worker_group.execute(_begin)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: _Any, backend_config: _Any) -> None:
        """Ray kills its workers afterwards, which would look like a failure."""
        super().on_shutdown(worker_group, backend_config)
        leaving = worker_group.execute_async(_process_group.leave)
        _ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)


@_dataclass
class DmltrainConfig(_TorchConfig):  # type: ignore[misc]
    """As ray.train.torch.TorchConfig, with the backend "dmltrain". `timeout_s`: of the group's collectives."""

    backend: str = _process_group.NAME

    @property
    def backend_cls(self) -> type:
        return _Backend
