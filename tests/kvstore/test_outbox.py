"""Frames that wait for a link."""

import socket
import threading
from types import SimpleNamespace

from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.outbox import Frame, Outbox

DEADLINE = 10.0


def test_what_is_made_in_turn_in_the_same_memory_leaves_before_that_is_written_again():
    """However much the link's path holds: pushes of a slice are all encoded to one place."""
    memory, begun, may_go_on = bytearray(4), threading.Event(), threading.Event()

    def first():
        begun.set()
        may_go_on.wait(DEADLINE)
        return b"0", None

    def made(value):
        memory[:] = value
        return b"", memoryview(memory)

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        other, _ = listening.accept()
        other.settimeout(DEADLINE)
        link = Link(sock)
        link.window = SimpleNamespace(size=16 << 20, sent=lambda count: None)
        outbox = Outbox(link, "to the other end")
        outbox.put_all([Frame(b"", prepare=first)])
        assert begun.wait(DEADLINE)
        outbox.put_all([Frame(b"", prepare=lambda value=value: made(value)) for value in (b"1111", b"2222")])
        may_go_on.set()
        assert outbox.finish(DEADLINE)
        with other:
            assert other.recv(9, socket.MSG_WAITALL) == b"011112222"
