"""A training run: the values that stay the same from its first epoch to its last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from logging import Logger

from dmltrain import record
from dmltrain.backends.backend import Backend, Trainer
from dmltrain.backends.table import BACKENDS
from dmltrain.data.dataset import Dataset
from dmltrain.kvstore import KVStore
from dmltrain.layers import Network
from dmltrain.options import Options
from dmltrain.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """See the module."""

    options: Options
    store: KVStore
    log: Logger
    network: Network
    dataset: Dataset
    trainer: Trainer
    schedule: Schedule
    batches: int  # steps in an epoch, the same on all workers
    first_epoch: int = 0

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.options.backend]

    def log_values(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.log.info(record.value(epoch, name, value))
