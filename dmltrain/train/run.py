"""A training run: the values that stay the same from its first epoch to its last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import Logger
from typing import TYPE_CHECKING

from dmltrain.backends.backend import Backend, Trainer
from dmltrain.backends.table import BACKENDS
from dmltrain.data.assignment.parts import Parts
from dmltrain.data.dataset import Dataset
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Network
from dmltrain.logs import record
from dmltrain.logs.metric import Sums
from dmltrain.optimizers.schedule import Schedule
from dmltrain.options import Options
from dmltrain.train import loading
from dmltrain.train.board import Board
from dmltrain.train.emulation import SlowPace
from dmltrain.train.plan import Plan, Position
from dmltrain.train.snapshot_signal import SnapshotSignal
from dmltrain.usage import Usage

if TYPE_CHECKING:
    from dmltrain.rounds.member import Member


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
    parts: Parts  # which worker trains on which samples in which batch
    plan: Plan  # the same on all workers
    start: Position = Position(0)
    own_validation: bool = False  # each worker has validation samples of its own; else all share the same
    pace: SlowPace | None = None  # with emulated computing
    usage: Usage = field(default_factory=Usage)
    board: Board = Board()
    snapshot_signal: SnapshotSignal = SnapshotSignal()
    member: Member | None = None  # in an elastic job, from the moment at which the job can go on without this worker

    @property
    def batches(self) -> int:
        """Steps in an epoch, the same on all workers."""
        return self.parts.steps

    @property
    def threads(self) -> int:
        """Number of threads that prepare batches."""
        return loading.threads(self.options, self.dataset)

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.options.backend]

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The metrics that the options ask for."""
        return sums.metrics(self.options.top_k, self.options.loss)

    def log_values(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.log.info(record.value(epoch, name, value))
        self.board.epoch(epoch, values)
