"""--snapshot-on-signal: SIGUSR1 to a worker asks all workers for a snapshot, such as before a cluster ends the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

from dmltrain.kvstore.base import KVStore

MOST_STEPS = 1000  # between two exchanges


class SnapshotSignal:
    """Of a run without --snapshot-on-signal: it never comes."""

    def comes(self) -> bool:
        """Whether any worker got the signal since the last exchange. Every worker must call this after every step."""
        return False


class AwaitedSnapshotSignal(SnapshotSignal):
    """The workers exchange whether one of them got the signal, about every `seconds`. An exchange is a sum over all
    workers, so all must make it after the same step. The sum therefore also has the workers' measured seconds of a
    step, from which all compute the same number of steps until the next exchange."""

    def __init__(self, store: KVStore, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._store, self._seconds, self._clock = store, seconds, clock
        self._signals = self._seen = 0
        self._steps, self._every = 0, 1  # steps since the last exchange; steps between it and the next
        self._asked_at = clock()
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def comes(self) -> bool:
        self._steps += 1
        return self._steps >= self._every and self._ask()

    def _ask(self) -> bool:
        signals, now = self._signals, self._clock()
        own = [float(signals > self._seen), (now - self._asked_at) / self._steps]
        given, seconds = self._store.all_reduce("notice", np.array(own))
        self._every = steps_within(self._seconds, seconds / self._store.num_workers)
        self._seen, self._steps, self._asked_at = signals, 0, self._clock()
        return bool(given)


def steps_within(seconds: float, of_a_step: float) -> int:
    """How many steps of `of_a_step` seconds fit into `seconds`: 1 to MOST_STEPS."""
    return max(1, min(MOST_STEPS, int(seconds / max(of_a_step, 1e-6))))


def snapshot_signal_of(seconds: float, store: KVStore) -> SnapshotSignal:
    """seconds: the value of --snapshot-on-signal; 0: the option is not given."""
    return AwaitedSnapshotSignal(store, seconds) if seconds else SnapshotSignal()
