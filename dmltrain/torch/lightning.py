"""Lightning over the servers of a job: `import dmltrain.torch.lightning` registers `Trainer(strategy="dmltrain")`.

The strategy is Lightning's DDPStrategy with the backend "dmltrain". In a job of dmltrain-launch the launcher says how
many workers there are and which one this is, so `devices` and `num_nodes` of the Trainer have no effect.
"""

import importlib as _importlib
import importlib.util as _util
from typing import Any as _Any

from dmltrain.backends.torch import process_group as _process_group
from dmltrain.backends.torch.process_group.group import CPU as _CPU
from dmltrain.base import env as _env
from dmltrain.base.errors import UserError as _UserError

_NAMES = ("lightning.pytorch", "pytorch_lightning")  # the same code in two packages, each with its own classes


def _strategy(package: str) -> type:
    ddp: _Any = _importlib.import_module(f"{package}.strategies").DDPStrategy
    torchrun: _Any = _importlib.import_module(f"{package}.plugins.environments").TorchElasticEnvironment

    class Place(torchrun):  # type: ignore[misc]
        """This worker's place, from the variables that torchrun has, too."""

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """The hosts may have unequal numbers of workers."""

    class Strategy(ddp):  # type: ignore[misc]
        """`options`: those of DDPStrategy."""

        def __init__(self, **options: _Any) -> None:
            if _env.read().launched:
                options.setdefault("cluster_environment", Place())
                options.setdefault("parallel_devices", [_CPU] * _env.local_workers())
            super().__init__(**{"process_group_backend": _process_group.NAME, **options})

        @property
        def distributed_sampler_kwargs(self) -> dict[str, _Any]:
            return {"num_replicas": self.world_size, "rank": self.global_rank}

        def setup_environment(self) -> None:
            if self.accelerator.name() != "cpu":
                raise _UserError('Trainer(strategy="dmltrain"): it has tensors on CPUs only: pass accelerator="cpu"')
            super().setup_environment()

    return Strategy


def _register(package: str) -> None:
    registry = _importlib.import_module(f"{package}.strategies").StrategyRegistry
    if _process_group.NAME not in registry:
        registry.register(
            _process_group.NAME, _strategy(package), description="DDP over the servers of dmltrain-launch's job"
        )


_installed = [name for name in _NAMES if _util.find_spec(name.partition(".")[0])]
if not _installed:
    raise _UserError("import dmltrain.torch.lightning: Lightning is not installed here: pip install lightning")
for _name in _installed:
    _register(_name)
