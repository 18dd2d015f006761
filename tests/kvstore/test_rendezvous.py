"""How two processes of a host set up shared memory, and what happens if one of them cannot."""

import concurrent.futures
import contextlib
import os
import queue
import socket
from pathlib import Path

import numpy as np
import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, rendezvous
from dmltrain.kvstore.transport.handshake import MEMORY, Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError
from dmltrain.kvstore.transport.wire import Header, Kind
from tests.kvstore.answering import answer, memory_listener
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

SIZE = 1 << 20
NOBODY = 65534


@pytest.fixture
def server():
    """A listener by name, with the result of its first caller: a Link or the exception."""
    sock, name = rendezvous.listen()

    def serve():
        caller, _ = sock.accept()
        try:
            connection = answer(caller, memory_listener())
            connection.limit(link.HANDSHAKE_SECONDS)
            rendezvous.exchange(connection, Arena(SIZE))
            return connection
        except (Closed, ArenaError) as error:
            caller.close()
            return error

    serving = begun(serve)
    yield name, lambda: serving.result(SECONDS)
    sock.close()


def caller():
    return Caller.new("job", b"key", "worker", 0, "server 0", MEMORY)


def called(name):
    """The link of a caller that has not shared its memory yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{name}")
    return link.greet(sock, caller())


def test_both_sides_read_what_the_other_writes_and_wait_as_long_as_they_must(server):
    name, outcome = server
    mine = rendezvous.connect(name, caller(), Arena(SIZE))
    theirs = outcome()
    for writer, reader in ((mine, theirs), (theirs, mine)):
        offset, memory = writer.own_arena.take(5)
        memory[:] = range(5)
        seen = reader.peer_arena.view(offset, 5)
        assert seen.tolist() == [0, 1, 2, 3, 4]
        memory[0] = 9
        assert seen[0] == 9 and not seen.flags.writeable
        assert writer.own_arena.offset_of(memory) == offset and writer.own_arena.offset_of(np.zeros(5)) is None
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        assert mine.sock.getsockopt(socket.SOL_SOCKET, option, 16) == bytes(16)
    theirs.send(Header(Kind.PULL).pack(), Header(Kind.DONE).pack())
    assert mine.read_headers(9) == [Header(Kind.PULL), Header(Kind.DONE)], "read together"
    mine.close()
    theirs.close()


def test_a_missing_listener_is_no_error_and_a_caller_that_is_dropped_tries_again():
    assert rendezvous.connect("dmltrain-nobody", caller(), Arena(SIZE)) is None
    # A listener drops callers at random if there are many, or it is busy.
    sock, name = rendezvous.listen()

    def serve():
        for _ in range(2):
            sock.accept()[0].close()
        rendezvous.exchange(answer(sock.accept()[0], memory_listener()), Arena(SIZE))

    serving = begun(serve)
    rendezvous.connect(name, caller(), Arena(SIZE)).close()
    serving.result(SECONDS)
    sock.close()


def test_a_caller_that_cannot_map_the_memory_is_forgotten(server):
    """It then connects over TCP: the listener must not take it for a worker that has left."""
    name, outcome = server
    connection = called(name)
    rendezvous.give(connection, Arena(SIZE))
    rendezvous.receive(connection)
    connection.close()
    assert isinstance(outcome(), Closed)


def test_a_server_without_shared_memory_is_left_at_once():
    sock, name = rendezvous.listen()

    def serve():
        connection = answer(sock.accept()[0], memory_listener())
        rendezvous.receive(connection)
        connection.send(b"A")  # and no descriptor
        with pytest.raises(Closed, match="end of stream"):
            connection.read_header()

    serving = begun(serve)
    with pytest.raises(ArenaError, match="the peer shares no memory") as raised:
        rendezvous.connect(name, caller(), Arena(SIZE))
    serving.result(SECONDS)
    assert raised, "while the error is still held, and with it all that it knows"
    sock.close()


@pytest.fixture
def full():
    """A listener by name whose queue unauthenticated peers have filled, and their sockets."""
    listening, name = rendezvous.listen()
    listening.listen(0)
    unauthenticated = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for each in unauthenticated:
        each.setblocking(False)
        each.connect_ex(f"\0{name}")
    yield listening, name
    for each in (listening, *unauthenticated):
        each.close()


def test_a_listener_whose_queue_is_full_is_waited_for(full):
    """Any user can fill it, so that is no reason to do without shared memory."""
    listening, name = full

    calling = begun(rendezvous.connect, name, caller(), Arena(SIZE))
    with pytest.raises(concurrent.futures.TimeoutError):
        calling.result(0.2)
    served = queue.Queue()
    environment = Environment(role="server", job="job", key=b"key")

    def admit(connection):
        rendezvous.exchange(connection, Arena(SIZE))

    begun(accept_loop, listening, environment, "server 0", lambda *each: served.put(each), admit)
    assert served.get(timeout=SECONDS)[1:] == ("worker", 0)
    found = calling.result(SECONDS)
    assert found.peer_arena
    found.close()


def test_a_listener_whose_queue_stays_full_is_not_waited_for_forever(full, monkeypatch):
    """TCP is used instead."""
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 0.2)
    assert begun(rendezvous.connect, full[1], caller(), Arena(SIZE)).result(SECONDS) is None


def test_a_caller_that_shares_nothing_is_not_waited_for_forever(server, monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    name, outcome = server
    connection = called(name)
    assert isinstance(outcome(), Closed)
    connection.close()


@pytest.mark.parametrize("count", [1, 2])
def test_one_memory_that_cannot_shrink_is_expected_and_no_other_is_kept(server, count):
    name, outcome = server
    connection = called(name)
    descriptors = [os.memfd_create("dmltrain-not-wanted") for _ in range(count)]
    socket.send_fds(connection.sock, [b"A"], descriptors)
    for each in descriptors:
        os.close(each)
    assert isinstance(outcome(), ArenaError) and "could shrink" in str(outcome())
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            names.append(os.readlink(each))
    assert not any("not-wanted" in each for each in names)
    connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_only_processes_of_one_user_share_memory():
    def all_same(ends):
        return {rendezvous.same_user(each) for each in ends}

    of_root = socket.socketpair()
    os.seteuid(NOBODY)
    try:
        of_nobody = socket.socketpair()
        found = [all_same(of_root), all_same(of_nobody)]
    finally:
        os.seteuid(0)
    assert [*found, all_same(of_root), all_same(of_nobody)] == [{False}, {True}, {True}, {False}]
    for each in (*of_root, *of_nobody):
        each.close()
