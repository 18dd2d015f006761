"""Which values a worker may read in the server's memory."""

import numpy as np
import pytest

from dmltrain.kvstore.server.core import Reply
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.slice import Buffer
from dmltrain.kvstore.server.unread import MAX_VALUES, Unread


def reply(offset, worker=0, key=0, index=0):
    return Reply(worker, key, index, 1, 0.0, Buffer(np.zeros(4, np.float32), "value", offset), 0, 0.0, 0.0, 0, None)


def test_a_value_outside_the_shared_memory_is_sent_and_each_worker_and_slice_has_its_own_limit():
    unread = Unread()
    assert not unread.lend(reply(None))
    for offset in range(MAX_VALUES):
        assert unread.lend(reply(64 * offset))
    assert not unread.lend(reply(64 * MAX_VALUES))
    assert unread.lend(reply(0)), "a value that the worker keeps anyway"
    for other in (reply(64, worker=1), reply(64, key=1), reply(64, index=1)):
        assert unread.lend(other)


def test_a_released_value_makes_room_and_only_what_was_lent_is_released():
    unread = Unread()
    kept = [reply(0) for _ in range(1024)]
    assert all(unread.lend(each) for each in kept)
    assert not unread.lend(reply(0))
    assert unread.released(0, 0, 0, 0) is kept[-1]
    assert unread.lend(reply(0))
    unread = Unread()
    unread.lend(reply(64))
    unread.released(0, 0, 0, 64)
    for worker, offset in ((0, 64), (1, 64), (0, 0)):
        with pytest.raises(Rejected, match="a release of key 0 slice 0 at an offset that was not sent"):
            unread.released(worker, 0, 0, offset)


def test_what_a_worker_that_has_left_kept():
    unread = Unread()
    kept = [reply(0), reply(64), reply(0, key=1)]
    other = reply(0, worker=1)
    for each in (*kept, other):
        unread.lend(each)
    assert list(unread.left(0)) == kept and list(unread.left(0)) == []
    assert list(unread.left(1)) == [other]
