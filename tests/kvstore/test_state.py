"""A server's state takes memory as it arrives."""

import os
import socket
import threading

import pytest

from dmltrain.kvstore.transport import state
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.seal import Keys
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from tests.fuzzing import peak


@pytest.fixture
def ends():
    own, other = socket.socketpair()
    with own, other:
        yield Link(own), other


@pytest.mark.parametrize("size", [0, 5, 1 << 20, (1 << 21) + 5])
def test_a_state_arrives_whole(ends, size):
    link, other = ends
    sent = os.urandom(size)
    sender = threading.Thread(target=other.sendall, args=(sent + b"next",))
    sender.start()
    assert state.receive(link, Header(Kind.STATE, size), size) == sent
    sender.join()
    assert other.fileno() and link.sock.recv(4) == b"next"


def test_a_state_with_a_seal_arrives_whole(ends):
    link, other = ends
    caller, sent = Link(other), os.urandom(3 << 20)
    keys = Keys(b"c" * 32, b"l" * 32, b"")
    link.protect(keys, "auth", True, "")
    caller.protect(keys, "auth", False, "")
    sender = threading.Thread(target=caller.send, args=(Header(Kind.STATE, len(sent)).pack(), sent))
    sender.start()
    assert state.receive(link, link.read_header()) == sent
    sender.join()


def test_memory_grows_with_what_arrives(ends):
    link, other = ends
    other.sendall(b"x" * 1000)
    other.shutdown(socket.SHUT_WR)
    before = peak()
    with pytest.raises(Closed, match=f"1000 of {1 << 33} bytes"):
        state.receive(link, Header(Kind.STATE, 1 << 33))
    assert peak() - before < 8 << 20


@pytest.mark.parametrize(
    "size, limit, said",
    [
        (1 << 60, (1 << 62,), "this machine cannot hold"),
        ((1 << 34) + 1, (), f"the limit is {1 << 34}"),
        (5, (4,), "the limit is 4"),
    ],
)
def test_a_state_above_the_limit_or_that_no_machine_can_hold_is_not_received(ends, size, limit, said):
    with pytest.raises(FrameError, match=f"a state of {size} bytes.* {said}"):
        state.receive(ends[0], Header(Kind.STATE, size), *limit)
