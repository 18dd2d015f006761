"""--snapshot-on-signal: SIGUSR1 to a worker asks all workers for a snapshot, such as before a cluster ends the job."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

from dmltrain.kvstore.base import KVStore

MOST_STEPS = 1000  # between two exchanges


class SnapshotSignal:
    """Of a run without --snapshot-on-signal: it never comes."""

    def begin(self, step: int) -> None:
        """An epoch begins with this step."""

    def next_stop(self, step: int) -> float:
        """The step before which the workers stop for an exchange, when they are at `step`."""
        return math.inf

    def comes(self, step: int) -> bool:
        """Whether any worker got the signal since the last exchange. Every worker must call this at each stop in an
        epoch."""
        return False


class AwaitedSnapshotSignal(SnapshotSignal):
    """The workers exchange whether one of them got the signal, about every `seconds`. An exchange is a sum over all
    workers, so all must make it after the same step. The sum therefore also has the workers' measured seconds of a
    step, from which all compute the same number of steps until the next exchange. In an elastic job a worker that joins
    gets its first stop with the others' state, and each epoch begins with an exchange after its first step: so it needs
    nothing that was agreed before it came."""

    def __init__(self, store: KVStore, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._store, self._seconds, self._clock = store, seconds, clock
        self._signals = self._seen = 0
        self.begin(0)
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def begin(self, step: int) -> None:
        self._asked, self._every, self._asked_at = step, 1, self._clock()

    def next_stop(self, step: int) -> float:
        return step + self._every

    def comes(self, step: int) -> bool:
        signals, now = self._signals, self._clock()
        own = np.array([float(signals > self._seen), (now - self._asked_at) / (step - self._asked), 1.0])
        given, seconds, workers = self._store.repeat(lambda: self._store.all_reduce("notice", own))
        self._every = steps_within(self._seconds, seconds / workers)
        self._seen, self._asked, self._asked_at = signals, step, self._clock()
        return bool(given)


def steps_within(seconds: float, of_a_step: float) -> int:
    """How many steps of `of_a_step` seconds fit into `seconds`: 1 to MOST_STEPS."""
    return max(1, min(MOST_STEPS, int(seconds / max(of_a_step, 1e-6))))


def snapshot_signal_of(seconds: float, store: KVStore) -> SnapshotSignal:
    """seconds: the value of --snapshot-on-signal; 0: the option is not given."""
    return AwaitedSnapshotSignal(store, seconds) if seconds else SnapshotSignal()
