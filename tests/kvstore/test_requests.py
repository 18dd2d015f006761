"""A service's answers to single frames, which the tests send on links of their own; its callers, and their pushes."""

import math
import queue
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.links.service import Service
from dmltrain.kvstore.server.links.worker_link import MAX_BACKLOG, WorkerLink
from dmltrain.kvstore.transport import link, message, wire
from dmltrain.kvstore.transport.data_links import DataLinks, Watch
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey, Leave
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header
from dmltrain.kvstore.view import View
from tests.kvstore.made import declaration, plain_sgd
from tests.kvstore.served import DEADLINE, MEMORY, Server, heard, leave
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS, wait_for

LARGE = 4 << 20  # elements: more than sockets of a host hold unread
INFINITY = float("inf")


@pytest.fixture
def serve(closed_at_the_end):
    return lambda *words, **options: closed_at_the_end(Server(*words, **options))


# -- answers ----------------------------------------------------------------------------------------------------------


def test_replies_are_sent_by_priority_and_a_pull_has_that_of_its_push(serve):
    """While a large value is on its way a probe and two pulls wait, of which the second is urgent."""
    first, second = serve(sizes=(LARGE, 1, 1, 1)).peers()
    rest = first.begun(key=0)
    first.send(FrameKind.PROBE, b"abc")
    first.send(FrameKind.PULL, key=1)
    first.send(FrameKind.PULL, key=2, priority=5)
    first.push([1], key=3)  # the second worker's value waits for this one, which comes after all that
    second.push([1], key=3, flags=Flag.PULL)
    assert second.value()[1] == [2.0]
    first.link.read_into(rest)
    assert [first.value()[0].key for _ in range(2)] == [2, 1]
    header, payload = first.answer()
    assert (header.kind, payload) == (FrameKind.PROBE, b"abc"), "the answers to requests come last"
    first, second = serve(sizes=(LARGE, 1, 1, 1)).peers()
    for key in (1, 2, 3):
        second.push([key], key=key)
    assert heard(second) == []
    rest = first.begun(key=0)
    for key, priority in ((1, 0), (2, 5), (3, 0)):
        first.push([0], key=key, flags=Flag.PULL, priority=priority)
    second.send(FrameKind.PULL, key=3, clock=1)
    assert second.value()[1] == [3.0]
    first.link.read_into(rest)
    assert [first.value()[0].key for _ in range(3)] == [2, 1, 3]


@pytest.mark.parametrize("shared", [False, True])
def test_a_reply_names_its_key_and_slice(serve, shared):
    first, second = serve(shared=shared).peers()
    first.push([1, 2, 3, 4], key=1, clock=1)
    second.push([1, 1, 1, 1], key=1, clock=1, flags=Flag.PULL)
    header, value = second.value()
    assert value == [2, 3, 4, 5]
    assert (header.view, header.key, header.slice, header.clock) == (0, 1, 0, 1)
    assert (header.length, header.dtype, header.number, header.priority) == (16, 0, 0.0, 0)
    assert header.flags == (Flag.SHARED if shared else 0)
    assert 0.0 <= header.waited < DEADLINE and 0.0 <= header.worked < DEADLINE


@pytest.mark.parametrize("asks", ["with the push", "later"])
@pytest.mark.parametrize("staleness", [0.0, INFINITY])
def test_times_of_asynchronous_values_count_from_the_request(serve, asks, staleness):
    first, second = serve("dist_ssp", staleness, make_step=plain_sgd).peers()
    second.push([1] * 4)
    first.push([1] * 4, rate=0.5, flags=Flag.PULL if asks == "with the push" else 0)
    if asks == "later":
        first.send(FrameKind.PULL, clock=1)
    header, _ = first.value()
    assert 0.0 <= header.waited < DEADLINE and 0.0 <= header.worked < DEADLINE


def test_a_worker_that_waits_for_a_leaving_worker_gets_its_value(serve):
    server = serve("dist_ssp", 0.0, make_step=plain_sgd)
    first, second = server.peer(0), server.peer(1)
    assert heard(second) == []
    first.push([1] * 4, rate=0.5, flags=Flag.PULL)
    assert heard(first) == []
    assert server.service.overdue() == "", "it has not waited for long"
    second.link.send(message.encode(Leave()))
    header, value = first.value()
    assert value == [-0.5] * 4 and 0.0 <= header.waited < DEADLINE


def test_a_worker_whose_link_ends_before_it_has_left_is_lost_and_has_not_finished(serve):
    server = serve()
    first, second = server.peer(0), server.peer(1)
    first.push([1] * 4, flags=Flag.PULL)
    assert heard(second) == []
    second.link.close()
    found = server.lost.get(timeout=DEADLINE)
    assert (found.own.role, found.peer.role, found.peer.index, found.peer.host) == ("server", "worker", 1, "")
    assert server.service.overdue() == server.service.overdue() == "", "the others wait for it until the job ends"


def test_a_worker_that_has_left_is_not_lost_when_its_link_ends(serve):
    server = serve()
    first, second = server.peer(0), server.peer(1)
    first.push([1] * 4)
    leave(second)
    wait_for(lambda: "worker 1 has finished already" in server.service.overdue(), "the server misses its push")
    first.send(FrameKind.PUSH, b"abc")
    assert "expected 16 bytes" in first.error()
    lost = server.lost.get(timeout=DEADLINE)
    assert lost.peer.index == 0, "and nobody before"
    assert "expected 16 bytes" in lost.error, "who is cut off for its frames is lost"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_value_is_in_use_until_it_is_sent_or_released_or_its_reader_leaves(serve):
    server = serve()
    server.peer().send(FrameKind.PULL)
    server.peer().value()
    used_by(server, 0)
    server = serve(shared=True)
    first, second = server.peer(0), server.peer(1)
    offset, offsets = server.core.slices()[0, 0].value.offset, []
    for each in (first, first, second):
        each.send(FrameKind.PULL)
        offsets.append(each.value()[0].offset)
    assert offsets == [offset] * 3
    used_by(server, 3)
    release = wire.release([(0, 0, offset)])
    first.send(FrameKind.RELEASE, release)
    used_by(server, 2)
    first.link.close()
    used_by(server, 1)
    second.send(FrameKind.RELEASE, release)
    used_by(server, 0)
    second.send(FrameKind.RELEASE, release)
    assert second.error() == "a release of key 0 slice 0 at an offset that was not sent"


def used_by(server, readers):
    wait_for(lambda: server.core.slices()[0, 0].value.readers == readers, f"{readers} read the value")


def flood(peer, frame, most):
    """Send frame(0), frame(1) ... until the server reads no more, or `most` of them. Returns how many were sent, and
    the rest of the last one."""
    peer.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 300_000))
    for sent in range(most):
        rest = memoryview(frame(sent))
        try:
            while rest:
                rest = rest[peer.link.sock.send(rest) :]
        except BlockingIOError:
            return sent, bytes(rest)
    return most, b""


@pytest.mark.parametrize(
    ("kind", "shared"),
    [(FrameKind.PROBE, False), (FrameKind.PROBE, True), (FrameKind.PULL, True), (FrameKind.READ_STATE, True)],
)
def test_a_peer_that_does_not_read_its_answers_is_not_read_either(serve, kind, shared):
    """The server keeps a limited number of answers for it. When it reads them, all arrive."""
    packed = []
    states = SimpleNamespace(pack_state=lambda: packed.append(True) or bytes(1 << 20))
    server = serve(sizes=(64,), shared=shared, states=states)
    peer = server.peer()
    payload = bytes(1 << 20 if kind == FrameKind.PROBE else 0)
    most = {FrameKind.PROBE: 150, FrameKind.PULL: 200_000, FrameKind.READ_STATE: 200_000}[kind]
    sent, rest = flood(peer, lambda number: Header(kind, len(payload)).pack() + payload, most)
    assert sent < most
    if kind == FrameKind.READ_STATE:
        assert len(packed) <= 66  # MiB
    else:
        peer.link.sock.settimeout(None)
        sender = threading.Thread(target=peer.link.sock.sendall, args=(rest,))
        sender.start()
        for _ in range(sent):
            assert peer.answer()[0].kind == {FrameKind.PROBE: FrameKind.PROBE, FrameKind.PULL: FrameKind.VALUE}[kind]
        sender.join()


def test_a_worker_that_pushes_in_shared_memory_and_does_not_read_is_not_read_either(serve):
    peer = serve("dist_async", INFINITY, sizes=(4,), shared=True, make_step=plain_sgd).peer()
    own = {"flags": Flag.SHARED | Flag.PULL, "offset": peer.arena.take(16)[0], "number": 0.5}
    sent, _ = flood(peer, lambda number: Header(FrameKind.PUSH, 16, clock=number + 1, **own).pack(), 100_000)
    assert sent < 100_000


def test_who_releases_nothing_gets_copies_and_memory_does_not_grow(serve):
    """Nor does who pulls one value again and again: test_shared_memory.py."""
    server = serve(sizes=(4,), shared=True)
    first, second = server.peer(0), server.peer(1)
    used, places = [], []
    for clock in range(1, 41):
        first.push([clock] * 4, clock=clock)
        second.push([1] * 4, clock=clock, flags=Flag.PULL)
        header, value = second.value()
        assert value == [clock + 1.0] * 4
        places.append(header.offset if header.flags & Flag.SHARED else None)
        used.append(server.arena.take(0)[0])
    assert len(set(places[:8])) == 8 and None not in places[:8] and set(places[8:]) == {None}
    assert used[12] == used[-1]
    second.send(FrameKind.RELEASE, wire.release([(0, 0, places[0])]))
    first.push([5] * 4, clock=41)
    second.push([1] * 4, clock=41, flags=Flag.PULL)
    assert second.value()[0].flags & Flag.SHARED, "there is room again"


def test_pulls_that_wait_are_limited(serve):
    server = serve()
    peer, other = server.peer(0), server.peer(1)
    for _ in range(128):
        other.send(FrameKind.PULL, clock=7)
    assert heard(other) == [], "these have arrived, and each worker has its own limit"
    for _ in range(129):
        peer.send(FrameKind.PULL, clock=7)
    assert "worker 0 has 128 pulls of key 0 slice 0 that wait" in peer.error()


def test_slices_of_all_sizes_complete_their_rounds_and_first_values_are_received_into_reused_memory(serve):
    server = serve()
    spare = server.core.slices()[0, 0].spare["value"]
    for value in (1, 2):
        server.peer().send(FrameKind.INIT, np.full(4, value, np.float32).tobytes())
        assert server.peer().answer()[0].kind == FrameKind.DONE
        assert len(spare) == 1
    server.peer().send(FrameKind.PULL)
    assert server.peer().value()[1] == [1.0] * 4, "the first"
    # The pushes that complete rounds are received into the same memory, whatever their size.
    sizes = (3, 50, 2, 50)
    server = serve(sizes=sizes)
    first, second = server.peer(0), server.peer(1)
    for key, size in enumerate(sizes):
        first.push(np.arange(size), key=key)
    assert heard(first) == []
    for key, size in enumerate(sizes):
        second.push(np.full(size, key), key=key, flags=Flag.PULL)
    for key, size in enumerate(sizes):
        assert second.value()[1] == [float(each + key) for each in range(size)]


def test_a_sender_waits_when_steps_are_slower_than_its_pushes(serve):
    """The first worker's step lasts until the test lets it end. The second one's pushes wait for theirs."""
    begun, may_go_on, most = threading.Event(), threading.Event(), 0

    def make_step(spec, key, value):
        def step(value, gradient, rate):
            nonlocal most
            begun.set()
            may_go_on.wait(DEADLINE)
            most = max(most, server.core.backlog(0, 0))
            value -= gradient

        return step

    server = serve("dist_async", INFINITY, make_step=make_step)
    first, second = server.peer(0), server.peer(1)
    first.push([1] * 4)
    assert begun.wait(DEADLINE)
    for clock in range(1, MAX_BACKLOG + 1):
        second.push([1] * 4, clock=clock)
    assert heard(second) == [], "so many are received,"
    for clock in range(MAX_BACKLOG + 1, 3 * MAX_BACKLOG):
        second.push([1] * 4, clock=clock)
    wait_for(lambda: server.core.backlog(0, 0) == MAX_BACKLOG + 1, "one more waits")
    may_go_on.set()
    second.send(FrameKind.PULL, clock=3 * MAX_BACKLOG - 1)
    assert second.value()[1] == [-3.0 * MAX_BACKLOG] * 4
    assert most == MAX_BACKLOG + 1, "and no more than one beyond"


def test_a_relays_rounds_report_its_times(serve):
    """A relay's sum comes back later, and its times with it. Then the next round, which has arrived, is summed."""
    forwarded = queue.Queue()
    server = serve(forward=lambda works: [forwarded.put(work) for work in works])
    first, second = server.peer(0), server.peer(1)
    for clock in (1, 2):
        first.push([clock] * 4, clock=clock)
        second.push([clock] * 4, clock=clock, flags=Flag.PULL)
    work = forwarded.get(timeout=DEADLINE)
    assert heard(second) == [] and forwarded.empty()
    server.service.arithmetic.done(work, 100.0, 50.0)
    header, value = second.value()
    assert value == [2.0] * 4
    assert 100.0 <= header.waited < 100.0 + DEADLINE and 49.9 < header.worked < 50.0 + DEADLINE
    server.service.arithmetic.done(forwarded.get(timeout=DEADLINE), 0.0, 0.0)
    header, value = second.value()
    assert value == [4.0] * 4 and header.waited < DEADLINE


# -- refusals and failures --------------------------------------------------------------------------------------------


SIZES = "worker 0 sent 4 bytes of float32 for key 0 slice 0, expected 16 bytes"


@pytest.mark.parametrize(
    "shared, request_, said",
    [
        (False, Header(FrameKind.PUSH, 4, clock=1), SIZES),
        (False, Header(FrameKind.INIT, 4), SIZES),
        (False, Header(FrameKind.PULL, key=7), "key 7 slice 0 was not declared"),
        (False, Header(FrameKind.PUSH, 16, clock=1, flags=Flag.SHARED), "shared memory, but this link shares none"),
        (False, Header(FrameKind.PROBE, wire.MAX_PROBE + 1), "control frame of 1048577 bytes, the limit is 1048576"),
        (
            False,
            Header(FrameKind.RELEASE, wire.MAX_CONTROL + 1),
            "control frame of 8388609 bytes, the limit is 8388608",
        ),
        (False, Header(FrameKind.RELEASE, 16), "a release of key 0 slice 0 at an offset that was not sent"),
        (True, Header(FrameKind.PUSH, 16, clock=1, flags=Flag.SHARED, offset=MEMORY - 8), "outside the shared memory"),
        (True, Header(FrameKind.PUSH, 4, clock=1, flags=Flag.SHARED), SIZES),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_invalid_request_is_refused_and_logged(serve, capfd, shared, request_, said):
    peer = serve(shared=shared).peer()
    peer.link.send(request_.pack(), bytes(min(request_.length, 16) if request_.is_followed else 0))
    error = peer.error()
    assert said in error and f"server 0: worker 0: {error}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "role, elastic, forward, kind, said",
    [
        ("worker", 0, None, FrameKind.VALUE, "from a worker"),
        ("worker", 0, None, FrameKind.HOLD, "from a worker"),
        ("worker", 1, None, FrameKind.FLAT, "from a worker in an elastic job"),
        ("worker", 0, pytest.fail, FrameKind.FLAT, "to a relay"),
        ("relay", 0, None, FrameKind.DECLARE, "from a relay"),
    ],
)
def test_a_frame_of_another_sender_or_job_is_refused(role, elastic, forward, kind, said):
    service = Service("server 0", replace(ENVIRONMENT, elastic=elastic), ServerCore(1), None, pytest.fail, forward)
    with pytest.raises(FrameError, match=f"^frame kind {int(kind)} {said}$"):
        WorkerLink(service, None, None, role, 0).take(Header(kind))


def test_a_bug_while_answering_is_reported_with_its_type_and_traceback(serve, capfd):
    peer = serve(states=SimpleNamespace(pack_state=lambda: {}["not foreseen"])).peer()
    peer.send(FrameKind.READ_STATE)
    assert peer.error() == "server 0: KeyError: 'not foreseen'"
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("error, traced", [(Rejected("no such step"), False), (ValueError("no such step"), True)])
def test_a_step_that_fails_ends_the_job_and_a_bug_leaves_its_traceback(serve, capfd, error, traced):
    def make_step(spec, key, value):
        def step(value, gradient, rate):
            raise error

        return step

    server = serve("dist_async", INFINITY, make_step=make_step)
    server.peer().push([1] * 4)
    assert server.failed.get(timeout=DEADLINE) == "server 0: no such step"
    assert ("Traceback" in capfd.readouterr().err) == traced


def test_threads_have_the_names_of_the_architecture_page_and_let_the_process_end(serve):
    """For debuggers and profilers."""
    assert heard(serve().peer()) == []
    names = {each.name for each in threading.enumerate()}
    assert {"accept", "arithmetic 0", "to worker 0"} <= names
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert (ended.stdout, ended.returncode) == ("True\n", 0)


PROGRAM = """
from tests.kvstore.served import FrameKind, Server

server = Server()
server.peer().send(FrameKind.PROBE)
print(server.peer().answer()[0].kind == FrameKind.PROBE)
"""
ENVIRONMENT = Environment(role="server", num_workers=3, num_servers=1, job="job", key=b"key")


@pytest.fixture
def reaches(closed_at_the_end):
    """Whether a caller of this role and index is served; workers 0 and 2 share a host."""
    core, listening = ServerCore(3), closed_at_the_end(link.listen("127.0.0.1"))
    core.workers.on_hosts([(0, 2), (1,)])
    Service("server 0", ENVIRONMENT, core, None, pytest.fail).accept(listening)

    def served(role, index):
        caller = Caller.new("job", b"key", role, index, "server 0")
        mine = closed_at_the_end(link.connect(listening.getsockname(), caller, SECONDS))
        try:
            mine.send(Header(FrameKind.PROBE).pack())
            return mine.read_header().kind == FrameKind.PROBE
        except Closed:
            return False

    return served


@pytest.mark.parametrize(
    "role, index, expected",
    [
        ("worker", 2, [True, False]),  # each role and index connects once
        ("relay", 0, [True, False]),
        ("worker", 3, [False]),  # the number that stands for the relay of worker 0
        ("relay", 2, [False]),
        ("relay", 1, [False]),
        ("relay", 3, [False]),
        ("server", 0, [False]),
    ],
)
def test_workers_are_accepted_and_relays_only_from_the_first_worker_of_a_host(reaches, logged, role, index, expected):
    assert [reaches(role, index) for _ in expected] == expected
    logged.wait_for(f"server 0: cut off {role} {index}: not a worker of this job, or already connected")


def service_of(core, *hosts, servers=1):
    core.workers.on_hosts(hosts or [(0,)])
    return Service("server 0", replace(ENVIRONMENT, num_servers=servers), core, None, pytest.fail)


def test_a_state_is_not_read_while_it_changes():
    core = ServerCore(1)
    service = service_of(core)
    core.keys.declare(0, declaration(sizes=(4,)))
    (work,) = core.push(0, 0, 0, 1, -1.0, core.buffer(0, 0, 0, 16, 0))
    with pytest.raises(Rejected, match="busy with optimizer steps for 0.05 s"), service.arithmetic.quiescent(0.05):
        pass
    core.done(work)
    with service.arithmetic.quiescent(0.05) as found:
        assert found is core


def test_the_first_view_that_a_server_enters_may_have_fewer_servers_than_the_start():
    """The scheduler was lost before this server had heard of view 1."""
    core = ServerCore(1)
    service = service_of(core, servers=2)
    both = declaration(sizes=(4, 4))
    core.keys.declare(0, replace(both, keys=both.keys[1:]))
    service.enter(View(2, 0, ((0,),), (1,)))
    core.keys.declare(0, both)
    assert sorted(core.slices()) == [(0, 0), (1, 0)]


def test_where_each_push_is_a_step_new_ones_wait_while_a_state_is_read():
    """Else a busy server of an elastic job would never be quiescent."""
    core = ServerCore(1, make_step=plain_sgd)
    service = service_of(core)
    core.keys.declare(0, declaration("dist_async", math.inf, sizes=(4,)))
    core.keys.optimize({})
    core.views.enter([(0,)])
    (slice_,) = core.slices().values()

    def pushed(clock):
        buffer = core.buffer(0, 0, 0, 16, 0)
        buffer.array[:] = 1
        return core.push(0, 0, 0, clock, -1.0, buffer)

    def made(steps):
        wait_for(lambda: slice_.steps == steps, f"{steps} steps are made")
        assert slice_.value.array.tolist() == [float(steps)] * 4

    (work,) = pushed(1)
    assert pushed(2) == []
    with service.shared.exclusive():
        assert core.pause()
        work.run()
        assert core.done(work) == [] and core.quiescent  # the second push waits
        (second,) = core.resume()
        second.run()
        core.done(second)
    with service.arithmetic.quiescent(1.0) as found:
        assert found is core and pushed(3) == []
    made(3)
    (work,) = pushed(4)
    assert pushed(5) == []
    service.shared.view = 1  # the view is an old one, which another scheduler repeats
    entering = begun(service.enter, View(1, 0, ((0,),), (0,)))
    wait_for(lambda: core._pauses, "steps pause")
    work.run()
    with service.shared.progress:
        assert core.done(work) == []
        service.shared.progress.notify_all()
    entering.result(SECONDS)
    made(5)


class Sender:
    """A link by which `values` come, in shared memory or behind the header."""

    own_arena = None

    def __init__(self, values):
        self.values, self.peer_arena = values, self

    def view(self, offset, length):
        return self.values.view(np.uint8)

    def read_into(self, target):
        target[:] = self.values.tobytes()


def test_a_push_that_completes_a_round_is_summed_before_the_next_is_received():
    """Worker 0 shares its memory, worker 1's pushes follow their headers: the second into the memory of the first."""
    length = 1 << 16  # more than is added up at once where all share
    core = ServerCore(2)
    key = DeclaredKey(0, "w", "float32", True, {"type": "none"}, ((0, length), (1, length)))
    core.keys.declare(0, Declare("dist_sync", 0.0, (key,)))
    service = service_of(core, (0,), (1,))
    service.arithmetic.pool.submit = lambda work: None  # no thread runs it
    for worker, flags in ((0, Flag.SHARED), (1, 0)):
        for index in (0, 1):
            header = Header(FrameKind.PUSH, 4 * length, 0, 0, index, 1, -1.0, 0, flags)
            sender = Sender(np.full(length, 10 * worker + index + 1, np.float32))
            WorkerLink(service, sender, None, "worker", worker).take(header)
    for index, total in ((0, 1 + 11), (1, 2 + 12)):
        (reply,) = core.pull(0, 0, index, 1)
        assert set(reply.buffer.array.tolist()) == {total}


def echo(connection):
    connection.send(Header(FrameKind.PROBE).pack())
    return connection.read_header().kind


def test_a_caller_that_missed_its_accept_connects_again():
    """Its time for the handshake ended, and the service takes the link without a frame for its own."""
    core, lost = ServerCore(1), []
    core.workers.on_hosts([(0,)])
    environment = replace(ENVIRONMENT, num_workers=1)
    links = DataLinks("server", environment, {}, Watch.earlier_than(8.5), lost.append)
    with link.listen("127.0.0.1") as listening:
        Service("server 0", environment, core, None, pytest.fail).accept(listening, links)
        address, caller = listening.getsockname(), Caller.new("job", b"key", "worker", 0, "server 0")
        for _ in range(3):
            link.connect(address, caller.again(), SECONDS).close()
        last = link.connect(address, caller.again(), SECONDS)
        assert echo(last) == FrameKind.PROBE
        second = link.connect(address, caller.again(), SECONDS)
        with pytest.raises(Closed):
            echo(second)
        second.close()
        assert not lost and echo(last) == FrameKind.PROBE
        last.close()
        wait_for(lambda: lost, "the end of the link is reported")
        peers = [(each.peer.role, each.peer.index) for each in lost]
        assert peers == [("worker", 0)], "it had a frame, and did not leave"
