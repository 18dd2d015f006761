"""--snapshot-on-signal: who gets SIGUSR1, all know of it after the same step."""

import os
import signal
from collections.abc import Iterator

import pytest

from dmltrain.kvstore.local import LocalKVStore
from dmltrain.train.snapshot_signal import AwaitedSnapshotSignal, SnapshotSignal, snapshot_signal_of, steps_within


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, handler)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 0.125  # s between two readings
        return self.now


def test_a_signal_is_noticed_once_at_the_next_question():
    notice = AwaitedSnapshotSignal(LocalKVStore(), 1.0, Clock())
    assert notice.next_stop(0) == 1 and not notice.comes(1)  # the first question, which measures 0.125 s a step
    os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.next_stop(1) == 9 and notice.comes(9) and not notice.comes(10)
    notice.begin(3)
    assert notice.next_stop(3) == 4, "an epoch begins anew, for workers that join"


def test_all_workers_hear_of_the_signal_of_one_and_make_as_many_steps_until_the_next_question():
    class Two(LocalKVStore):
        num_workers = 2

        def all_reduce(self, name, array):
            return array + [1.0, 0.375, 1.0]  # the other worker has got it, and is slower

    notice = AwaitedSnapshotSignal(Two(), 1.0, Clock())
    assert notice.comes(1) and notice.next_stop(1) == 5


def test_questions_are_neither_more_than_one_a_step_nor_too_rare_and_only_jobs_that_ask_have_it():
    assert (steps_within(2.0, 5.0), steps_within(2.0, 0.1), steps_within(2.0, 0.0)) == (1, 20, 1000)
    assert type(snapshot_signal_of(0.0, LocalKVStore())) is SnapshotSignal and not SnapshotSignal().comes(1)
    assert isinstance(snapshot_signal_of(2.0, LocalKVStore()), AwaitedSnapshotSignal)
