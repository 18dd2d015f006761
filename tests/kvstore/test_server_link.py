"""A worker's link to a server by hand: the frames that it makes and takes, in views of an elastic job."""

import os
import socket
import threading
from functools import partial

import numpy as np
import pytest

from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.base import Handle, ViewChanged
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.shared_memory import Arena, Mapping
from dmltrain.kvstore.transport.wire import HEADER_SIZE, Flag, Header, Kind
from dmltrain.kvstore.worker.server_link import ServerLink
from dmltrain.kvstore.worker.sharding import Slice
from dmltrain.kvstore.worker.undo import Undo
from dmltrain.kvstore.worker.worker_slice import Landing, WorkerSlice
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

MEMORY = 1 << 26  # bytes of an arena
LARGE = 4 << 20  # elements: more than sockets hold unread
VALUES = np.array([1.0, 0.3, 0.2, 0.1], np.float32)


class Pair:
    """A worker's link, and the server's end of it, which the test plays."""

    def __init__(self, shared):
        self.arena = Arena(MEMORY) if shared else None
        self.lost = []
        if shared:
            mine, self.sock = socket.socketpair()
        else:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                mine = socket.create_connection(listening.getsockname())
                self.sock, _ = listening.accept()
        self.sock.settimeout(SECONDS)
        connection = Link(mine)
        connection.settle()
        if self.arena:
            connection.own_arena, connection.peer_arena = Arena(MEMORY), Mapping(os.dup(self.arena.descriptor))
        self.link = ServerLink("server 0", connection, self.lost.append, pytest.fail)

    def send(self, kind, payload=b"", **fields):
        self.sock.sendall(Header(kind, len(payload), **fields).pack() + payload)

    def send_value(self, values, clock, view):
        """Returns the value's offset in shared memory."""
        values = np.asarray(values, np.float32)
        if self.arena is None:
            return self.send(Kind.VALUE, values.tobytes(), clock=clock, view=view)
        offset, memory = self.arena.take(values.nbytes)
        memory.view(np.float32)[:] = values
        header = Header(Kind.VALUE, values.nbytes, clock=clock, view=view, flags=Flag.SHARED, offset=offset)
        self.sock.sendall(header.pack())
        return offset

    def frame(self):
        """The next frame of the worker: its header and payload."""
        header = Header.unpack(self._read(HEADER_SIZE))
        return header, self._read(header.length if header.is_followed else 0)

    def _read(self, size):
        found = bytearray()
        while len(found) < size:
            found += self.sock.recv(size - len(found))
        return bytes(found)

    def answered(self):
        """Return when the worker has handled all that was sent before."""
        there = threading.Event()
        self.link.echoed = lambda size: there.set()
        self.send(Kind.PROBE)
        assert there.wait(SECONDS), self.lost

    def pull(self, clock=1, keep=None):
        """A pull of slice 0, which the server has read: its handle, and where its value will be."""
        slice_, target, handle = made_slice(), np.zeros(4, np.float32), Handle(1, "pull", SECONDS)
        self.link.expect(Landing(slice_, target, handle, keep), clock)
        self.link.outbox.put_all([self.link.pull(slice_, clock, 0)])
        header, _ = self.frame()
        assert (header.kind, header.clock, header.view) == (Kind.PULL, clock, self.link.view)
        return handle, target

    def close(self):
        self.link.fail("the test is over")
        self.link.outbox.finish(SECONDS)
        self.sock.close()


@pytest.fixture
def pair(request, closed_at_the_end):
    return closed_at_the_end(Pair(getattr(request, "param", False)))


each_way = pytest.mark.parametrize("pair", [False, True], ids=["tcp", "shm"], indirect=True)
in_shared_memory = pytest.mark.parametrize("pair", [True], ids=["shm"], indirect=True)


def made_slice(length=4):
    return WorkerSlice(Slice(0, 0, 0, length, 0), np.dtype(np.float32), None, None)


def made_coded_slice(length=4):
    codec = codecs.make({"type": "int8"})
    slice_ = WorkerSlice(Slice(0, 0, 0, length, 0), np.dtype(np.float32), codec, codec)
    slice_.undo = Undo(slice_.residual)
    return slice_


def ones(length=4):
    return np.ones(length, np.float32)


def next_release(pair):
    """The offsets that the worker's next frame releases, and the view of that."""
    header, payload = pair.frame()
    assert header.kind == Kind.RELEASE
    return [offset for _, _, offset in wire.parse_release(payload)], header.view


def made(frame):
    """A frame's header and payload, as the sending thread makes them."""
    first, *payload = [bytes(part) for part in frame.views()]
    return Header.unpack(first[:HEADER_SIZE]), first[HEADER_SIZE:] + b"".join(payload)


@each_way
def test_frames_and_requests_have_the_view_in_which_they_were_made(pair):
    """Also those whose headers are made when they are sent."""
    slice_, link, frames = made_slice(), pair.link, []
    for view in (1, 2):
        link.enter(view)
        frames += [link.push(slice_, ones(), 1, 0.5, 0), link.pull(slice_, 1, 0), link.release([(slice_, 64)])]
    headers = [made(frame)[0] for frame in frames]
    assert [header.kind for header in headers] == [Kind.PUSH, Kind.PULL, Kind.RELEASE] * 2
    assert [header.view for header in headers] == [1, 1, 1, 2, 2, 2]
    link.enter(3)
    link.initialise(slice_, ones(), SECONDS)
    assert (pair.frame()[0].kind, link.view) == (Kind.INIT, 3)
    link.leave(SECONDS)
    header, _ = pair.frame()
    assert (header.kind, header.view) == (Kind.LEAVE, 3)


def test_what_waits_to_be_sent_in_an_earlier_view_is_dropped(pair):
    """But a frame is finished of which a part was sent, and values are released."""
    large, slice_ = made_slice(LARGE), made_slice()
    pair.link.enter(1)
    pair.link.outbox.put_all([pair.link.push(large, ones(LARGE), 1, 0.5, 0)])
    first = Header.unpack(pair._read(HEADER_SIZE))  # the rest waits until it is read
    pair.link.outbox.put_all([pair.link.push(slice_, ones(), 1, 0.5, 0), pair.link.release([(slice_, 64)])])
    pair.link.outbox.put_all([pair.link.pull(slice_, 1, 0)])
    pair.link.initialise(slice_, ones(), SECONDS)
    pair.link.enter(2)
    pair.link.outbox.put_all([pair.link.push(slice_, 3 * ones(), 1, 0.5, 0)])
    assert (first.kind, first.view) == (Kind.PUSH, 1)
    assert pair._read(first.length) == ones(LARGE).tobytes()
    assert next_release(pair) == ([64], 1)
    header, payload = pair.frame()
    assert (header.kind, header.view, payload) == (Kind.PUSH, 2, (3 * ones()).tobytes())


@each_way
def test_a_value_of_an_earlier_view_is_dropped(pair):
    """In shared memory it is released at once, so that the server does not keep it."""
    pair.link.enter(1)
    before, old = pair.pull()
    pair.link.enter(2)
    with pytest.raises(ViewChanged):
        before.wait()
    now, new = pair.pull()
    late = pair.send_value([9] * 4, clock=1, view=1)
    if pair.arena:
        assert next_release(pair)[0] == [late]
    pair.answered()
    assert not now.done and not old.any() and not new.any()
    pair.send_value([5] * 4, clock=1, view=2)
    now.wait()
    assert new.tolist() == [5.0] * 4 and not old.any() and not pair.lost


@in_shared_memory
def test_no_value_of_an_earlier_view_is_read_in_place(pair):
    kept = []
    pair.link.enter(1)
    for clock in (1, 2):
        pair.pull(clock, lambda slice_, value, offset: kept.append(offset))
    read = pair.send_value([1] * 4, clock=1, view=1)
    pair.answered()
    pair.link.enter(2)
    late = pair.send_value([2] * 4, clock=2, view=1)
    assert next_release(pair)[0] == [late]
    assert kept == [read], "its key releases it with its next push"


@each_way
def test_a_value_that_nobody_asked_for_in_this_view_ends_the_link(pair):
    pair.link.enter(1)
    pair.pull()
    pair.link.enter(2)
    ended = threading.Event()
    pair.link.lost = lambda error: (pair.lost.append(error), ended.set())
    pair.send_value([9] * 4, clock=1, view=2)
    assert ended.wait(SECONDS) and "unexpected frame" in str(pair.lost[0])


@pytest.mark.parametrize("late", [Kind.DONE, Kind.STATE])
def test_an_answer_to_a_request_of_an_earlier_view_is_dropped(pair, late):
    pair.link.enter(1)
    before = pair.link.initialise(made_slice(), ones(), SECONDS)
    pair.link.enter(2)
    assert pair.link.last_request() is None
    with pytest.raises(ViewChanged):
        before.wait()
    now = pair.link.initialise(made_slice(), ones(), SECONDS)
    pair.send(late, b"x" * 100 if late == Kind.STATE else b"", view=1)
    pair.answered()
    assert not now.done
    pair.send(Kind.DONE, view=2)
    now.wait()
    assert not pair.lost


@each_way
def test_the_announcement_of_a_view_that_was_entered_meanwhile_interrupts_nothing(pair):
    pair.link.enter(2)
    pulled, target = pair.pull()
    pair.link.interrupt(2)
    assert not pulled.done
    pair.send_value([5] * 4, clock=1, view=2)
    pulled.wait()
    assert target.tolist() == [5.0] * 4


@each_way
def test_an_interrupted_wait_ends_and_its_value_still_comes(pair):
    """Until this worker enters the next view, servers answer in the present one, and LEAVE in every view."""
    pair.link.enter(1)
    pulled, target = pair.pull()
    asked, leaving = pair.link.initialise(made_slice(), ones(), SECONDS), pair.link.leave(SECONDS)
    waits = [begun(handle.wait) for handle in (pulled, asked)]
    pair.link.interrupt(2)
    for each in waits:
        with pytest.raises(ViewChanged):
            each.result(SECONDS)
    assert not leaving.done
    pair.send_value([5] * 4, clock=1, view=1)
    pair.send(Kind.DONE, view=1)
    pair.send(Kind.DONE, view=1)
    leaving.wait()
    pair.answered()
    assert target.tolist() == [5.0] * 4 and pair.link.last_request() is None and not pair.lost


@in_shared_memory
def test_memory_of_a_push_is_written_again_when_the_server_has_answered_in_a_later_view(pair):
    """Until then it may still read the push, and gets others through the socket."""
    slice_ = made_slice()

    def push(clock, value):
        header, payload = made(pair.link.push(slice_, value * ones(), clock, 0.5, 0))
        return header.offset if header.flags & Flag.SHARED else np.frombuffer(payload, np.float32).tolist()

    def answer(clock, view, late=False):
        handle = Handle(1, "pull", SECONDS)
        if not late:
            pair.link.expect(Landing(slice_, np.zeros(4, np.float32), handle), clock)
        pair.send_value([0] * 4, clock, view)
        assert pair.frame()[0].kind == Kind.RELEASE
        pair.answered()

    pair.link.enter(1)
    place = push(1, 1)
    answer(1, view=1)
    assert push(2, 2) == place
    pair.link.enter(2)
    assert push(1, 3) == [3.0] * 4
    answer(2, view=1, late=True)
    assert push(2, 4) == [4.0] * 4
    answer(1, view=2)
    assert push(3, 5) == place


@each_way
def test_a_push_of_an_earlier_view_does_not_change_the_residual(pair):
    """Its round was aborted, and what it has left in the residual was taken back."""
    slice_, push = made_coded_slice(), partial(pair.link.push, clock=1, rate=-1.0, priority=0)
    pair.link.enter(1)
    pair.link.op = 1
    late = push(slice_, VALUES)
    made(push(slice_, VALUES))
    after = slice_.residual.copy()
    assert after.any()
    pair.link.enter(2)
    slice_.undo.back_to(0)
    made(late)
    assert not slice_.residual.any()
    made(push(slice_, VALUES))
    assert np.array_equal(slice_.residual, after)


@each_way
def test_a_push_to_a_lost_server_is_not_prepared_any_more(pair):
    """Its slice has another link by then."""
    slice_ = made_coded_slice()
    late = pair.link.push(slice_, VALUES, clock=1, rate=-1.0, priority=0)
    pair.link.retire()
    with pytest.raises(Closed, match="goes on without server 0"):
        late.views()
    assert slice_.sending is None and not slice_.residual.any()
