"""--snapshot-on-signal: SIGUSR1 to a worker asks all workers for a snapshot, such as before a cluster ends the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

from dmltrain.kvstore.base import KVStore

MOST_STEPS = 1000  # between two questions


class SnapshotSignal:
    """The notice of a run without --snapshot-on-signal, which never comes."""

    def comes(self) -> bool:
        """Whether a worker has got the signal since the last question. Every worker must ask after the same steps."""
        return False


class AwaitedSnapshotSignal(SnapshotSignal):
    """The workers ask each other about every `seconds`: a question is a sum over all of them, so each must come to it
    after the same step, which the sum's own measured seconds say."""

    def __init__(self, store: KVStore, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._store, self._seconds, self._clock = store, seconds, clock
        self._signals = self._seen = 0
        self._steps, self._every = 0, 1  # since the last question; until the next one
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
    """How many steps to make in `seconds`, at least one."""
    return max(1, min(MOST_STEPS, int(seconds / max(of_a_step, 1e-6))))


def snapshot_signal_of(seconds: float, store: KVStore) -> SnapshotSignal:
    """What the option asks for."""
    return AwaitedSnapshotSignal(store, seconds) if seconds else SnapshotSignal()
