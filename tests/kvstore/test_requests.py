"""A service's answers to single frames, which the tests send on links of their own: what workers cannot provoke."""

import queue
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.service import MAX_BACKLOG
from dmltrain.kvstore.transport import message, wire
from dmltrain.kvstore.transport.message import Leave
from dmltrain.kvstore.transport.wire import Flag, Header, Kind
from tests.kvstore.made import plain_sgd
from tests.kvstore.served import DEADLINE, MEMORY, Server, heard, leave
from tests.waiting import SECONDS, wait_for

LARGE = 4 << 20  # elements: more than sockets of a host hold unread
INFINITY = float("inf")


@pytest.fixture
def serve():
    made = []

    def begin(*words, **options):
        made.append(Server(*words, **options))
        return made[-1]

    yield begin
    for each in made:
        each.close()


# -- answers ----------------------------------------------------------------------------------------------------------


def test_replies_are_sent_by_priority_and_a_pull_has_that_of_its_push(serve):
    """While a large value is on its way a probe and two pulls wait, of which the second is urgent."""
    first, second = serve(sizes=(LARGE, 1, 1, 1)).peers()
    rest = first.begun(key=0)
    first.send(Kind.PROBE, b"abc")
    first.send(Kind.PULL, key=1)
    first.send(Kind.PULL, key=2, priority=5)
    first.push([1], key=3)  # the second worker's value waits for this one, which comes after all that
    second.push([1], key=3, flags=Flag.PULL)
    assert second.value()[1] == [2.0]
    first.link.read_into(rest)
    assert [first.value()[0].key for _ in range(2)] == [2, 1]
    header, payload = first.answer()
    assert (header.kind, payload) == (Kind.PROBE, b"abc"), "the answers to requests come last"
    first, second = serve(sizes=(LARGE, 1, 1, 1)).peers()
    for key in (1, 2, 3):
        second.push([key], key=key)
    assert heard(second) == []
    rest = first.begun(key=0)
    for key, priority in ((1, 0), (2, 5), (3, 0)):
        first.push([0], key=key, flags=Flag.PULL, priority=priority)
    second.send(Kind.PULL, key=3, clock=1)
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
        first.send(Kind.PULL, clock=1)
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
    first.send(Kind.PUSH, b"abc")
    assert "expected 16 bytes" in first.error()
    lost = server.lost.get(timeout=DEADLINE)
    assert lost.peer.index == 0, "and nobody before"
    assert "expected 16 bytes" in lost.error, "who is cut off for its frames is lost"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_value_is_in_use_until_it_is_sent_or_released_or_its_reader_leaves(serve):
    server = serve()
    server.peer().send(Kind.PULL)
    server.peer().value()
    used_by(server, 0)
    server = serve(shared=True)
    first, second = server.peer(0), server.peer(1)
    offset, offsets = server.core.slices()[0, 0].value.offset, []
    for each in (first, first, second):
        each.send(Kind.PULL)
        offsets.append(each.value()[0].offset)
    assert offsets == [offset] * 3
    used_by(server, 3)
    release = wire.release([(0, 0, offset)])
    first.send(Kind.RELEASE, release)
    used_by(server, 2)
    first.link.close()
    used_by(server, 1)
    second.send(Kind.RELEASE, release)
    used_by(server, 0)
    second.send(Kind.RELEASE, release)
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
    ("kind", "shared"), [(Kind.PROBE, False), (Kind.PROBE, True), (Kind.PULL, True), (Kind.READ_STATE, True)]
)
def test_a_peer_that_does_not_read_its_answers_is_not_read_either(serve, kind, shared):
    """The server keeps a limited number of answers for it. When it reads them, all arrive."""
    packed = []

    def other(connection, header):
        packed.append(header)
        return Header(Kind.STATE, 1 << 20).pack(), memoryview(bytearray(1 << 20))

    server = serve(sizes=(64,), shared=shared, other=other)
    peer = server.peer()
    payload = bytes(1 << 20 if kind == Kind.PROBE else 0)
    most = {Kind.PROBE: 150, Kind.PULL: 200_000, Kind.READ_STATE: 200_000}[kind]
    sent, rest = flood(peer, lambda number: Header(kind, len(payload)).pack() + payload, most)
    assert sent < most
    if kind == Kind.READ_STATE:
        assert len(packed) <= 66  # MiB
    else:
        peer.link.sock.settimeout(None)
        sender = threading.Thread(target=peer.link.sock.sendall, args=(rest,))
        sender.start()
        for _ in range(sent):
            assert peer.answer()[0].kind == {Kind.PROBE: Kind.PROBE, Kind.PULL: Kind.VALUE}[kind]
        sender.join()


def test_a_worker_that_pushes_in_shared_memory_and_does_not_read_is_not_read_either(serve):
    peer = serve("dist_async", INFINITY, sizes=(4,), shared=True, make_step=plain_sgd).peer()
    own = {"flags": Flag.SHARED | Flag.PULL, "offset": peer.arena.take(16)[0], "number": 0.5}
    sent, _ = flood(peer, lambda number: Header(Kind.PUSH, 16, clock=number + 1, **own).pack(), 100_000)
    assert sent < 100_000


def test_who_releases_nothing_gets_copies_and_memory_does_not_grow(serve):
    """Nor does who pulls one value again and again: test_unread.py."""
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
    second.send(Kind.RELEASE, wire.release([(0, 0, places[0])]))
    first.push([5] * 4, clock=41)
    second.push([1] * 4, clock=41, flags=Flag.PULL)
    assert second.value()[0].flags & Flag.SHARED, "there is room again"


def test_pulls_that_wait_are_limited(serve):
    server = serve()
    peer, other = server.peer(0), server.peer(1)
    for _ in range(128):
        other.send(Kind.PULL, clock=7)
    assert heard(other) == [], "these have arrived, and each worker has its own limit"
    for _ in range(129):
        peer.send(Kind.PULL, clock=7)
    assert "worker 0 has 128 pulls of key 0 slice 0 that wait" in peer.error()


def test_slices_of_all_sizes_complete_their_rounds_and_first_values_are_received_into_reused_memory(serve):
    server = serve()
    spare = server.core.slices()[0, 0].spare["value"]
    for value in (1, 2):
        server.peer().send(Kind.INIT, np.full(4, value, np.float32).tobytes())
        assert server.peer().answer()[0].kind == Kind.DONE
        assert len(spare) == 1
    server.peer().send(Kind.PULL)
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
    second.send(Kind.PULL, clock=3 * MAX_BACKLOG - 1)
    assert second.value()[1] == [-3.0 * MAX_BACKLOG] * 4
    assert most == MAX_BACKLOG + 1, "and no more than one beyond"


def test_a_relays_rounds_report_its_times(serve):
    """A relay's sum comes back later, and its times with it. Then the next round, which has arrived, is summed."""
    forwarded = queue.Queue()
    server = serve(forward=lambda works: [forwarded.put(each) for each in works])
    first, second = server.peer(0), server.peer(1)
    for clock in (1, 2):
        first.push([clock] * 4, clock=clock)
        second.push([clock] * 4, clock=clock, flags=Flag.PULL)
    work = forwarded.get(timeout=DEADLINE)
    assert heard(second) == [] and forwarded.empty()
    server.service.done(work, 100.0, 50.0)
    header, value = second.value()
    assert value == [2.0] * 4
    assert 100.0 <= header.waited < 100.0 + DEADLINE and 49.9 < header.worked < 50.0 + DEADLINE
    server.service.done(forwarded.get(timeout=DEADLINE), 0.0, 0.0)
    header, value = second.value()
    assert value == [4.0] * 4 and header.waited < DEADLINE


# -- refusals and failures --------------------------------------------------------------------------------------------


SIZES = "worker 0 sent 4 bytes of float32 for key 0 slice 0, expected 16 bytes"


@pytest.mark.parametrize(
    "shared, request_, said",
    [
        (False, Header(Kind.PUSH, 4, clock=1), SIZES),
        (False, Header(Kind.INIT, 4), SIZES),
        (False, Header(Kind.PULL, key=7), "key 7 slice 0 was not declared"),
        (
            False,
            Header(Kind.PUSH, 16, clock=1, flags=Flag.SHARED),
            "a payload in shared memory, but this link shares none",
        ),
        (False, Header(Kind.PROBE, wire.MAX_PROBE + 1), "control frame of 1048577 bytes, the limit is 1048576"),
        (False, Header(Kind.RELEASE, wire.MAX_CONTROL + 1), "control frame of 8388609 bytes, the limit is 8388608"),
        (False, Header(Kind.RELEASE, 16), "a release of key 0 slice 0 at an offset that was not sent"),
        (True, Header(Kind.PUSH, 16, clock=1, flags=Flag.SHARED, offset=MEMORY - 8), "outside the shared memory"),
        (True, Header(Kind.PUSH, 4, clock=1, flags=Flag.SHARED), SIZES),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_invalid_request_is_refused_and_logged(serve, capfd, shared, request_, said):
    peer = serve(shared=shared).peer()
    peer.link.send(request_.pack(), bytes(min(request_.length, 16) if request_.is_followed else 0))
    error = peer.error()
    assert said in error and f"server 0: worker 0: {error}" in capfd.readouterr().err


def test_a_bug_while_answering_is_reported_with_its_type_and_traceback(serve, capfd):
    def other(connection, header):
        raise RuntimeError("not foreseen")

    peer = serve(other=other).peer()
    peer.send(Kind.READ_STATE)
    assert peer.error() == "server 0: RuntimeError: not foreseen"
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
from tests.kvstore.served import Kind, Server

server = Server()
server.peer().send(Kind.PROBE)
print(server.peer().answer()[0].kind == Kind.PROBE)
"""
