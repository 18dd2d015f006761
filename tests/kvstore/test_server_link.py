"""A worker's links: the frames to and from a server, errors if its host's relay is unavailable, and a shared relay."""

import os
import queue
import socket
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.base import Handle, MembershipEnded, ViewChanged
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.links.service import Service
from dmltrain.kvstore.transport import host, link, rendezvous, wire
from dmltrain.kvstore.transport.data_links import DataLinks, Watch
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.job import NewServer, ServerAddress
from dmltrain.kvstore.transport.shared_memory import Arena, Mapping
from dmltrain.kvstore.transport.wire import HEADER_SIZE, Flag, FrameKind, Header
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.routes import Routes, Sharing
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.sharding import Slice
from dmltrain.kvstore.worker.links.undo import Undo
from dmltrain.kvstore.worker.links.worker_slice import Destination, WorkerSlice
from tests.kvstore.made import SYNC, start
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
            return self.send(FrameKind.VALUE, values.tobytes(), clock=clock, view=view)
        offset, memory = self.arena.take(values.nbytes)
        memory.view(np.float32)[:] = values
        header = Header(FrameKind.VALUE, values.nbytes, clock=clock, view=view, flags=Flag.SHARED, offset=offset)
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
        self.send(FrameKind.PROBE)
        assert there.wait(SECONDS), self.lost

    def pull(self, clock=1, keep=None):
        """A pull of slice 0, which the server has read: its handle, and where its value will be."""
        slice_, target, handle = made_slice(), np.zeros(4, np.float32), Handle(1, "pull", SECONDS)
        self.link.expect(Destination(slice_, target, handle, keep), clock)
        self.link.outbox.put_all([self.link.pull(slice_, clock, 0)])
        header, _ = self.frame()
        assert (header.kind, header.clock, header.view) == (FrameKind.PULL, clock, self.link.view)
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
    assert header.kind == FrameKind.RELEASE
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
    assert [header.kind for header in headers] == [FrameKind.PUSH, FrameKind.PULL, FrameKind.RELEASE] * 2
    assert [header.view for header in headers] == [1, 1, 1, 2, 2, 2]
    link.enter(3)
    link.initialise(slice_, ones(), SECONDS)
    assert (pair.frame()[0].kind, link.view) == (FrameKind.INIT, 3)
    link.leave(SECONDS)
    header, _ = pair.frame()
    assert (header.kind, header.view) == (FrameKind.LEAVE, 3)


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
    assert (first.kind, first.view) == (FrameKind.PUSH, 1)
    assert pair._read(first.length) == ones(LARGE).tobytes()
    assert next_release(pair) == ([64], 1)
    header, payload = pair.frame()
    assert (header.kind, header.view, payload) == (FrameKind.PUSH, 2, (3 * ones()).tobytes())


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


@pytest.mark.parametrize("late", [FrameKind.DONE, FrameKind.STATE])
def test_an_answer_to_a_request_of_an_earlier_view_is_dropped(pair, late):
    pair.link.enter(1)
    before = pair.link.initialise(made_slice(), ones(), SECONDS)
    pair.link.enter(2)
    assert pair.link.last_request() is None
    with pytest.raises(ViewChanged):
        before.wait()
    now = pair.link.initialise(made_slice(), ones(), SECONDS)
    pair.send(late, b"x" * 100 if late == FrameKind.STATE else b"", view=1)
    pair.answered()
    assert not now.done
    pair.send(FrameKind.DONE, view=2)
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
    for wait in waits:
        with pytest.raises(ViewChanged):
            wait.result(SECONDS)
    assert not leaving.done
    pair.send_value([5] * 4, clock=1, view=1)
    pair.send(FrameKind.DONE, view=1)
    pair.send(FrameKind.DONE, view=1)
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
            pair.link.expect(Destination(slice_, np.zeros(4, np.float32), handle), clock)
        pair.send_value([0] * 4, clock, view)
        assert pair.frame()[0].kind == FrameKind.RELEASE
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
    after = slice_.residual.values.copy()
    assert after.any()
    pair.link.enter(2)
    slice_.undo.back_to(0)
    made(late)
    assert not slice_.residual.values.any()
    made(push(slice_, VALUES))
    assert np.array_equal(slice_.residual.values, after)


@each_way
def test_a_push_to_a_lost_server_is_not_prepared_any_more(pair):
    """Its slice has another link by then."""
    slice_ = made_coded_slice()
    late = pair.link.push(slice_, VALUES, clock=1, rate=-1.0, priority=0)
    pair.link.retire()
    with pytest.raises(Closed, match="goes on without server 0"):
        late.views()
    assert slice_.sending is None and not slice_.residual.values.any()


@each_way
@pytest.mark.parametrize("asked_before", [True, False])
def test_a_job_that_has_ended_answers_nothing_and_lets_go(pair, asked_before):
    if not asked_before:
        pair.link.retire(job_ended=True)
    asked, leaving = pair.link.request(Header(FrameKind.READ_GONE).pack(), 60.0), pair.link.leave(60.0)
    if asked_before:
        pair.link.retire(job_ended=True)
    with pytest.raises(MembershipEnded, match="the job has come to its end"):
        asked.wait()
    leaving.wait()


ENVIRONMENT = Environment(role="worker", index=1, num_workers=2, num_servers=1, job="job", key=b"key")


@pytest.fixture
def server(closed_at_the_end):
    """The address of a server that claims to be on another host."""
    listening = closed_at_the_end(link.listen("127.0.0.1"))
    its_own = replace(ENVIRONMENT, role="server", index=0)
    Service("server 0", its_own, ServerCore(2), None, pytest.fail).accept(listening)
    return (*listening.getsockname(), "", "elsewhere")


@pytest.mark.parametrize("another_job", [False, True])
def test_the_error_for_an_unreachable_relay_has_a_fix(server, another_job):
    sock, name = rendezvous.listen()
    other_environment = Environment(role="worker", num_workers=2, job="another job", key=b"key")
    if another_job:
        Service("relay", other_environment, ServerCore(2), None, pytest.fail).accept(sock)
    else:
        sock.close()
    start_message = start([(host.identity(), name), (host.identity(), "own")], [server])
    with pytest.raises(JobLost) as raised:
        Routes(ENVIRONMENT, start_message, Sharing(ENVIRONMENT, sums=True), print, print)
    said = str(raised.value)
    assert "worker 1 shares no memory with worker 0 of its host" in said and "--host-sum off" in said
    assert ("another job" if another_job else "it is unreachable") in said
    sock.close()


def test_a_relay_that_loses_its_server_reports_it_even_after_its_own_worker_finished(server):
    """No other process notices a broken connection between two processes that still run."""
    lost, over = queue.Queue(), threading.Event()
    environments = [replace(ENVIRONMENT, index=rank) for rank in range(2)]
    shares = [Sharing(environment, sums=True) for environment in environments]
    start_message = start([(host.identity(), sharing.socket_name) for sharing in shares], [server])
    pairs = zip(environments, shares, strict=True)
    first, second = (Routes(its, start_message, sharing, lost.put, pytest.fail) for its, sharing in pairs)
    leaving = begun(first.relay.leave, over)
    first.relay.links[0].link.cut()
    found = lost.get(timeout=SECONDS)
    assert (found.own.role, found.own.index, found.peer.role, found.peer.index) == ("relay", 0, "server", 0)
    over.set()
    leaving.result(SECONDS)  # the job is over
    for each in (*first.links, *second.links):
        each.link.cut()


def test_a_lost_link_to_a_replacement_names_the_host_of_the_replacement(server):
    lost = queue.Queue()
    its = replace(ENVIRONMENT, transport="tcp", elastic=1)
    address = ServerAddress(*server, host_name="h1")
    start_message = replace(start([("a", ""), ("b", "")], [server]), servers=(address,))
    routes = Routes(its, start_message, Sharing(its, sums=False), lost.put, pytest.fail)
    view = View(2, 5, ((0,), (1,)), (0,), joined_servers=(0,))
    routes.announce(view, [NewServer(0, replace(address, host_name="h9"))])
    routes.enter(view, connects=True)
    routes.servers[0].link.cut()
    assert lost.get(timeout=SECONDS).peer.host == "h9"


OF_THREE = Environment(role="worker", num_workers=3, num_servers=1, job="job", key=b"key")
HOSTS = ("shared", "shared", "own")
SIZE = 1000


class Told(Handle):
    """A handle that keeps the times of its value."""

    def one_done(self, trip=None):
        self.trip = trip
        super().one_done(trip)


class Worker:
    """One worker's links and keys."""

    def __init__(self, rank, start_message, sharing):
        self.routes = Routes(replace(OF_THREE, index=rank), start_message, sharing, lambda reason: None, pytest.fail)
        self.entries = KeyEntries(self.routes, 3, SYNC, SECONDS)
        self.entries.declare(["w"], [np.zeros(SIZE, np.float32)], is_weight=True)
        for asked in [server_link.last_request() for server_link in self.routes.links]:
            if asked:
                asked.wait()
        self.value = np.zeros(SIZE, np.float32)

    def pushpull(self, values, ready_for):
        """Push a gradient that was ready so many seconds ago; returns the handle of the value."""
        (way,) = self.entries.find("w").ways
        ready = time.perf_counter() - ready_for
        handle = Told(1, "w", SECONDS)
        way.link.expect(Destination(way.slice, self.value, handle, asked=ready), 1)
        way.link.outbox.put_all([way.link.push(way.slice, values, 1, -1.0, 0, Flag.PULL, ready)])
        return handle

    def cut(self):
        for server_link in self.routes.links:
            server_link.link.cut()


@pytest.fixture
def workers():
    """Both workers of the host, the first with the relay, and the third worker."""
    core, listening = ServerCore(3), link.listen("127.0.0.1")
    core.workers.on_hosts([(0, 1), (2,)])
    own, lost = replace(OF_THREE, role="server"), queue.Queue()
    links = DataLinks("server", own, {}, Watch(8.0), lost.put)
    Service("server 0", own, core, None, pytest.fail).accept(listening, links)
    shares = [Sharing(replace(OF_THREE, index=rank), sums=True) for rank in range(3)]
    names = [(name, sharing.socket_name) for name, sharing in zip(HOSTS, shares, strict=True)]
    start_message = start(names, [(*listening.getsockname(), "", "the server's")])
    made = [Worker(rank, start_message, sharing) for rank, sharing in enumerate(shares)]
    made[0].lost = lost  # by the server
    yield made
    for each in made:
        each.cut()
    listening.close()


def round_of(workers, ready_for):
    """All push their number and wait for the sum. Returns the times of each."""
    pushes = enumerate(zip(workers, ready_for, strict=True), 1)
    handles = [worker.pushpull(np.full(SIZE, number, np.float32), ago) for number, (worker, ago) in pushes]
    for handle in handles:
        handle.wait()
    return [handle.trip for handle in handles]


@pytest.mark.parametrize(
    "ready_for", [(0, 0, 0), (1000, 0, 0), (0, 1000, 0), (1000, 1000, 0), (0, 1000, 2000), (2000, 1000, 0)]
)
def test_a_hosts_sum_is_ready_when_its_last_gradient_is_ready(workers, ready_for):
    """Each has waited since its own gradient was ready for the last of all, not for its host's first one."""
    trips = round_of(workers, ready_for)
    assert [trip.waited for trip in trips] == [pytest.approx(each, abs=SECONDS) for each in ready_for]
    assert [set(worker.value.tolist()) for worker in workers] == [{6.0}] * 3


def test_the_relay_does_not_outlive_the_job(workers):
    over, echoed = threading.Event(), threading.Event()
    (upstream,) = workers[0].routes.relay.links.values()
    upstream.echoed = lambda size: echoed.set()
    upstream.outbox.put(Header(FrameKind.PROBE).pack())
    assert echoed.wait(SECONDS), "a link without a frame is not missed"
    leaving = begun(workers[0].routes.relay.leave, over)
    over.set()
    leaving.result(SECONDS)
    assert workers[0].lost.get(timeout=SECONDS).peer.role == "relay", "it does not say that no push is missing"
