"""The training metrics of an epoch, and the time that its steps take: without the pauses for tests and snapshots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from dmltrain.logs import record
from dmltrain.logs.metric import Sums
from dmltrain.train.plan import Position
from dmltrain.train.run import Run


class Meter:
    """Counts from its creation on."""

    def __init__(self, run: Run, epoch: int) -> None:
        self._run, self._epoch = run, epoch
        self.whole = Sums()  # from the epoch's start to the last line
        self._recent = Sums()  # from the last line to the last pause
        self._started = self._line = time.perf_counter()

    def show(self, batch: int) -> None:
        """Log the line of a batch: speed and metrics since the last line."""
        recent, now = self._recent + self._run.trainer.take_sums(), time.perf_counter()
        speed, metrics = recent.samples / (now - self._line), self._run.metrics(recent)
        self._run.log.info(record.batch(self._epoch, batch, speed, metrics))
        plan = self._run.plan
        self._run.board.batch(plan.iteration(Position(self._epoch, (batch + 1) // plan.group)), speed, metrics)
        self.whole, self._recent, self._line = self.whole + recent, Sums(), now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time, and what the trainer sums up in it, does not count as training."""
        self._recent += self._run.trainer.take_sums()
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._started, self._line = self._started + seconds, self._line + seconds

    def finish(self) -> float:
        """Complete `whole`. Returns the seconds of the epoch."""
        self.whole += self._recent + self._run.trainer.take_sums()
        return time.perf_counter() - self._started
