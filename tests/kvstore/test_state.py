"""A server's state is received piece by piece."""

import os
import socket
import threading
import tracemalloc

import pytest

from dmltrain.kvstore.transport import state
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind


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


def test_memory_grows_with_what_arrives(ends):
    link, other = ends
    other.sendall(b"x" * 1000)
    other.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    try:
        with pytest.raises(Closed, match="1000 of 1048576 bytes"):
            state.receive(link, Header(Kind.STATE, 1 << 34))
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_state_above_the_limit_is_not_received(ends):
    with pytest.raises(FrameError, match=f"a state of {(1 << 34) + 1} bytes, the limit is {1 << 34}"):
        state.receive(ends[0], Header(Kind.STATE, (1 << 34) + 1))
    with pytest.raises(FrameError, match="a state of 5 bytes, the limit is 4"):
        state.receive(ends[0], Header(Kind.STATE, 5), 4)
