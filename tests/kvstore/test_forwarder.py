"""A forwarder between two processes of a job: it passes their handshake on, and then changes what travels."""

import contextlib
import queue
import socket
import threading
from dataclasses import replace

import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, message, wire
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.seal import SIZE
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

CALLER = Caller.new("job", b"key", "worker", 3, "server 0")
ABORT = message.encode(message.Abort("the forwarder wants it so"))
PUSH = Header(Kind.PUSH, 4).pack(), b"abcd"
HEARTBEAT = message.encode(message.Heartbeat())


class Forwarder:
    """Passes bytes on. `change(data)`, once set, replaces each piece that goes from the caller to the listener."""

    def __init__(self, address):
        self.change = lambda data: data
        self._listening, self._ends = socket.create_server(("127.0.0.1", 0)), []
        self.address = self._listening.getsockname()
        begun(self._run, address)

    def _run(self, address):
        caller, _ = self._listening.accept()
        listener = socket.create_connection(address)
        self._ends += [caller, listener]
        begun(self._pass, listener, caller, lambda data: data)
        self._pass(caller, listener, lambda data: self.change(data))

    def _pass(self, source, target, change):
        with contextlib.suppress(OSError):  # closed at the test's end
            while data := source.recv(1 << 16):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)

    def inject(self, data):
        """Send to the listener, as if the caller had."""
        self._ends[1].sendall(data)

    def close(self):
        for each in (self._listening, *self._ends):
            each.close()


@pytest.fixture
def between():
    """between(level) -> the caller's link, the listener's, and the forwarder."""
    with contextlib.ExitStack() as opened:

        def opening(each):
            return opened.enter_context(contextlib.closing(each))

        def connect(level):
            listening, served = opening(link.listen("127.0.0.1")), queue.Queue()
            environment = Environment(role="server", job="job", key=b"key", wire=level)
            begun(accept_loop, listening, environment, "server 0", lambda *caller: served.put(caller))
            forwarder = opening(Forwarder(listening.getsockname()))
            mine = opening(link.connect(forwarder.address, replace(CALLER, wire=level), SECONDS))
            return mine, opening(served.get(timeout=SECONDS)[0]), forwarder

        yield connect


def received(end):
    header = end.read_header()
    return header.kind, bytes(end.read_payload(header)) if header.is_followed else b""


levels = pytest.mark.parametrize("level", ["plain", "auth"])


@levels
@pytest.mark.parametrize("injected", [ABORT, ABORT + bytes(SIZE)], ids=["without a seal", "with a seal"])
def test_an_injected_abort_is_not_believed(between, level, injected):
    mine, theirs, forwarder = between(level)
    mine.send(HEARTBEAT)
    assert received(theirs)[0] == Kind.CONTROL
    forwarder.inject(injected)
    mine.send(HEARTBEAT)
    with pytest.raises(FrameError, match="injected"):
        received(theirs)


@levels
def test_a_repeated_control_frame_is_not_believed(between, level):
    mine, theirs, forwarder = between(level)
    forwarder.change = lambda data: data + data
    mine.send(message.encode(message.Barrier("1")))
    assert received(theirs)[0] == Kind.CONTROL
    with pytest.raises(FrameError, match="repeated"):
        received(theirs)


CHANGES = {
    "another value": lambda data: data.replace(b"abcd", b"abce"),
    "another key": lambda data: Header(Kind.PUSH, 4, key=1).pack() + data[wire.HEADER_SIZE :],
    "injected": lambda data: b"".join(PUSH) + data,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_with_auth_data_frames_are_protected_too(between, change):
    mine, theirs, forwarder = between("auth")
    mine.send(*PUSH)
    assert received(theirs) == (Kind.PUSH, b"abcd")
    forwarder.change = change
    mine.send(*PUSH)
    with pytest.raises(FrameError, match="changed, injected"):
        received(theirs)


def test_with_plain_data_frames_are_not(between):
    """As docs/security.md says."""
    mine, theirs, forwarder = between("plain")
    forwarder.change = CHANGES["another value"]
    mine.send(*PUSH)
    assert received(theirs) == (Kind.PUSH, b"abce")


def test_a_frame_that_a_forwarder_withholds_is_missed(between):
    mine, theirs, forwarder = between("auth")
    withheld = threading.Event()
    forwarder.change = lambda data: withheld.set() or b""
    mine.send(*PUSH)
    assert withheld.wait(SECONDS)
    forwarder.change = lambda data: data
    mine.send(*PUSH)
    with pytest.raises(FrameError, match="lost"):
        received(theirs)
