"""Handle: how an operation in progress ends: complete, failed, or interrupted by a change of the members."""

import threading

import pytest

from dmltrain.errors import JobLost
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import ViewChanged


def test_every_wait_of_an_interrupted_handle_raises():
    handle = Handle(2, "pull of key 7", 5.0)
    handle.one_done()
    handle.interrupt()
    assert handle.done
    handle.one_done()  # a value that comes late completes nothing
    for _ in range(2):
        with pytest.raises(ViewChanged, match="^pull of key 7: the members of the job have changed$"):
            handle.wait()


def test_a_wait_in_progress_is_interrupted():
    class Announced(threading.Event):
        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    waiting, found = threading.Event(), []
    handle = Handle(1, "pull", 60.0)
    handle._done = Announced()

    def wait():
        with pytest.raises(ViewChanged):
            handle.wait()
        found.append("interrupted")

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(10.0)
    handle.interrupt()
    thread.join(10.0)
    assert found == ["interrupted"]


def test_a_complete_handle_stays_complete():
    copied = []
    handle = Handle(1, "pull", 5.0)
    handle.then(lambda: copied.append(1))
    handle.one_done()
    handle.interrupt()
    handle.wait()
    assert copied == [1]


def test_what_was_to_follow_an_interrupted_operation_does_not_run():
    copied = []
    handle = Handle(1, "pull", 5.0)
    handle.then(lambda: copied.append(1))
    handle.interrupt()
    with pytest.raises(ViewChanged):
        handle.wait()
    assert copied == []


@pytest.mark.parametrize("first", ["fail", "interrupt"])
def test_a_lost_job_counts_more_than_a_change_of_members(first):
    handle = Handle(1, "pull", 5.0)
    for each in sorted(["fail", "interrupt"], key=lambda name: name != first):
        handle.fail("server 0 was lost") if each == "fail" else handle.interrupt()
    with pytest.raises(JobLost, match="server 0 was lost"):
        handle.wait()


def test_in_a_store_that_is_not_elastic_nothing_is_repeated():
    store = KVStore()
    assert store.repeat(lambda: 7) == 7
    with pytest.raises(ViewChanged):
        store.repeat(lambda: _raise(ViewChanged("no elastic job")))
    store.rank = 3
    assert (store.member, store.elastic, store.keeps_gradients, store.is_alone) == (3, False, False, False)


def _raise(error):
    raise error
