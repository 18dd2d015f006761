"""Handle: how an operation in progress ends: complete, failed, or interrupted by a change of the members."""

import threading

import pytest

from dmltrain.errors import JobLost
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import ViewChanged
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS


def made(count=1):
    """A handle, and what has followed its operation."""
    handle, followed = Handle(count, "pull of key 7", 5.0), []
    handle.then(lambda: followed.append("followed"))
    return handle, followed


def test_every_wait_of_an_interrupted_handle_raises_and_nothing_follows():
    handle, followed = made(2)
    handle.one_done()
    handle.interrupt()
    assert handle.done
    handle.one_done()  # a value that comes late completes nothing
    for _ in range(2):
        with pytest.raises(ViewChanged, match="^pull of key 7: .*members"):
            handle.wait()
    assert followed == []


def test_a_wait_in_progress_is_interrupted():
    class Announced(threading.Event):
        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    waiting, handle = threading.Event(), Handle(1, "pull", SECONDS)
    handle._done = Announced()
    found = begun(handle.wait)
    assert waiting.wait(SECONDS)
    handle.interrupt()
    with pytest.raises(ViewChanged):
        found.result(SECONDS)


def test_a_complete_handle_stays_complete():
    handle, followed = made()
    handle.one_done()
    handle.interrupt()
    handle.wait()
    assert followed == ["followed"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_lost_job_counts_more_than_a_change_of_members(order):
    handle, _ = made()
    ends = [lambda: handle.fail("server 0 was lost"), handle.interrupt]
    for number in order:
        ends[number]()
    with pytest.raises(JobLost, match="server 0 was lost"):
        handle.wait()


def test_in_a_store_that_is_not_elastic_nothing_is_repeated():
    store, (interrupted, _) = KVStore(), made()
    interrupted.interrupt()
    assert store.repeat(lambda: 7) == 7
    with pytest.raises(ViewChanged):
        store.repeat(interrupted.wait)
    store.rank = 3
    assert (store.member, store.elastic, store.keeps_gradients, store.is_alone) == (3, False, False, False)
