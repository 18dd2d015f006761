"""How two processes of a host set up shared memory, and what happens if one of them cannot."""

import os
import socket
import threading

import numpy as np
import pytest

from dmltrain.kvstore.transport import link, rendezvous
from dmltrain.kvstore.transport.handshake import Caller, Listener
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError, Mapping

SIZE = 1 << 20


@pytest.fixture
def server():
    """A listener by name, with the result of its first caller: a Link or the exception."""
    sock, name = rendezvous.listen()
    outcome = []

    def serve():
        caller, _ = sock.accept()
        try:
            connection, _, _ = link.accept(caller, Listener.new("job", b"key"))
            rendezvous.exchange(connection, Arena(SIZE))
            outcome.append(connection)
        except (Closed, ArenaError) as error:
            outcome.append(error)
            caller.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield name, lambda: (thread.join(10.0), outcome[0])[1]
    thread.join(10.0)
    sock.close()


def caller():
    return Caller.new("job", b"key", "worker", 0)


def test_both_sides_read_what_the_other_writes(server):
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
    mine.close()
    theirs.close()


def test_a_missing_listener_is_not_an_error():
    assert rendezvous.connect("dmltrain-nobody", caller(), Arena(SIZE)) is None


def test_a_caller_that_cannot_map_the_memory_is_forgotten(server):
    """It then connects over TCP: the listener must not take it for a worker that has left."""
    name, outcome = server
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{name}")
    connection = link.greet(sock, caller())
    rendezvous.give(connection, Arena(SIZE))
    rendezvous.receive(connection)
    connection.close()
    assert isinstance(outcome(), Closed)


def test_memory_that_could_shrink_is_refused(server):
    name, outcome = server
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{name}")
    connection = link.greet(sock, caller())
    descriptor = os.memfd_create("loose")
    socket.send_fds(sock, [b"A"], [descriptor])
    os.close(descriptor)
    assert "could shrink" in str(outcome())
    connection.close()


def test_a_server_without_shared_memory_is_left_at_once():
    sock, name = rendezvous.listen()
    left = []

    def serve():
        connection, _, _ = link.accept(sock.accept()[0], Listener.new("job", b"key"))
        rendezvous.receive(connection)
        connection.send(b"A")  # and no descriptor
        with pytest.raises(Closed, match="end of stream"):
            connection.read_header()
        left.append(True)

    serving = threading.Thread(target=serve)
    serving.start()
    with pytest.raises(ArenaError, match="the peer shares no memory") as raised:
        rendezvous.connect(name, caller(), Arena(SIZE))
    serving.join(10.0)
    assert left and raised, "while the error is still held, and with it all that it knows"
    sock.close()


def test_processes_of_other_users_are_recognized():
    one, other = socket.socketpair()
    assert rendezvous.same_user(one) and rendezvous.same_user(other)
    one.close()
    other.close()


def test_offsets_outside_the_memory_are_refused():
    arena = Arena(SIZE)
    mapping = Mapping(os.dup(arena.descriptor))
    for offset, size in ((SIZE - 4, 5), (-1, 2), (0, SIZE + 1), (1 << 63, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside the shared memory"):
            mapping.view(offset, size)
    assert arena.take(SIZE + 1) is None
