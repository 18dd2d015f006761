"""Sockets: connect and accept with the handshake, read and write frames. Calls block; each link has one reading and one
writing thread.

Reads go directly into the caller's memory, with one system call for each slice (MSG_WAITALL). Writes gather frames
(outbox.py). A unix socket mostly carries headers, because payloads lie in shared memory (shared_memory.py); one read
takes several of them. `Link.cut` can be called from any thread: blocked calls return, and the reader raises Closed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, TypeVar

from dmltrain.kvstore.transport import message, send_window, wire
from dmltrain.kvstore.transport.handshake import Caller, Listener
from dmltrain.kvstore.transport.message import Accept, Challenge, Hello, Message, Proof, Refuse
from dmltrain.kvstore.transport.send_window import SendWindow
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind

if TYPE_CHECKING:
    from dmltrain.kvstore.transport.shared_memory import Arena, Mapping

HANDSHAKE_SECONDS = 5.0
DRAIN_SECONDS, DRAIN_READS = 0.5, 8  # limits for reading what a refused caller has sent
SOCKET_BUFFER = 1 << 20  # bytes; measured best on loopback
TCP_RTO_MAX_MS, RETRANSMIT_MS = 44, 1000  # linux/tcp.h; longest pause between two retransmissions
CHUNK = 1 << 20  # maximum bytes of one send call, so that they are still in the cache when the receiver reads them
AHEAD_BYTES = 1 << 16  # maximum of one read from a unix socket

Handshake = TypeVar("Handshake", Hello, Challenge, Proof, Accept)


class Closed(Exception):
    """The peer closed the connection, or it was cut."""


class Link:
    """One connection after its handshake."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.bytes_sent = 0  # through the socket
        self.bytes_received = 0
        self.own_arena: Arena | None = None  # memory that this side shares with the peer,
        self.peer_arena: Mapping | None = None  # and the peer with this side; both or none
        self.window: SendWindow | None = None  # only of a link between hosts
        self._header = bytearray(wire.HEADER_SIZE)
        self._reads_ahead = False
        self._ahead = memoryview(b"")
        self._send_lock = threading.Lock()

    def read_header(self) -> Header:
        """Raises Closed at the end of the stream, FrameError if the bytes are not a frame."""
        self.read_into(memoryview(self._header))
        return Header.unpack(self._header)

    def read_headers(self, most: int) -> list[Header]:
        """The next header and those already received, at most `most`, up to the first that a payload follows."""
        headers = [self.read_header()]
        while len(headers) < most and len(self._ahead) >= wire.HEADER_SIZE and not headers[-1].is_followed:
            headers.append(self.read_header())
        return headers

    def read_into(self, target: memoryview) -> None:
        """Fill `target` (bytes). Raises Closed if the stream ends first."""
        done, size = 0, len(target)
        if self._reads_ahead:
            if not self._ahead and 0 < size <= AHEAD_BYTES:
                self._read_ahead()
            done = min(size, len(self._ahead))
            target[:done] = self._ahead[:done]
            self._ahead = self._ahead[done:]
        while done < size:
            try:
                got = self.sock.recv_into(target[done:] if done else target, size - done, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise Closed(f"silent for {HANDSHAKE_SECONDS:g} s during the handshake") from error
            except OSError as error:
                raise Closed(str(error)) from error
            if not got:
                raise Closed("end of stream" if not done else f"stream ended after {done} of {size} bytes of a frame")
            done += got
        self.bytes_received += size

    def _read_ahead(self) -> None:
        try:
            self._ahead = memoryview(self.sock.recv(AHEAD_BYTES))
        except OSError as error:
            raise Closed(str(error)) from error
        if not self._ahead:
            raise Closed("end of stream")

    def read_message(self, header: Header, limit: int = wire.MAX_CONTROL) -> Message:
        """The control message after `header`. Raises FrameError if it is too long or invalid."""
        return message.decode(header.kind, self.read_payload(header, limit))

    def read_payload(self, header: Header, limit: int = wire.MAX_CONTROL) -> bytearray:
        """The payload after `header`, of a frame other than a slice's. Raises FrameError if it is too long."""
        if header.length > limit:
            raise FrameError(f"control frame of {header.length} bytes, the limit is {limit}")
        payload = bytearray(header.length)
        self.read_into(memoryview(payload))
        return payload

    def send(self, *data: bytes | memoryview) -> None:
        """Send these in order, with nothing between them. Raises Closed."""
        with self._send_lock:
            self._send([memoryview(each).cast("B") for each in data if len(each)])

    def _send(self, views: list[memoryview]) -> None:
        try:
            while views:
                small = len(views) > 1 and len(views[0]) < CHUNK
                sent = self.sock.sendmsg(views) if small else self.sock.send(views[0][:CHUNK])
                self.bytes_sent += sent
                if self.window:
                    self.window.sent(sent)
                while views and sent >= len(views[0]):
                    sent -= len(views[0])
                    views.pop(0)
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise Closed(str(error)) from error

    def send_now(self, data: bytes) -> int:
        """Send as many bytes as the socket accepts without blocking; returns how many. If the link is cut, returns
        len(data): the reading thread reports the loss."""
        try:
            with self._send_lock:
                sent = self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self.cut()
            return len(data)
        self.bytes_sent += sent
        return sent

    def settle(self, answers: bool = False) -> None:
        """Apply the settings for the time after the handshake. `answers`: whether this side only answers. Waits have no
        time limit from now on: lost peers are detected by the scheduler's heartbeats, and their links are cut."""
        _limit_waits(self.sock, 0)
        if self.sock.family == socket.AF_UNIX:
            self._reads_ahead = True
            return
        if _inside_host(self.sock):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        else:
            self.window = SendWindow(self.sock, send_window.ANSWERS if answers else send_window.PUSHES)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # from Linux 6.15 on: retransmit within a second after a network outage
            self.sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RETRANSMIT_MS)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.sock.close()


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock, host)
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    return sock


def connect(address: tuple[str, int], caller: Caller, timeout: float) -> Link:
    """Connect and authenticate. Raises OSError, Closed, or FrameError with the reason of a refusal."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock, address[0])
        sock.settimeout(timeout)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    link = greet(sock, caller)
    link.settle()
    return link


def greet(sock: socket.socket, caller: Caller) -> Link:
    """The caller's part of the handshake on a connected socket. Raises Closed, or FrameError with the reason of a
    refusal, and closes the socket."""
    link = Link(sock)
    try:
        _limit_waits(sock, HANDSHAKE_SECONDS)
        link.send(message.encode(caller.hello()))
        link.send(message.encode(caller.proof(_expect(link, Challenge))))
        _expect(link, Accept)
    except BaseException:
        link.close()
        raise
    return link


def accept(sock: socket.socket, listener: Listener) -> tuple[Link, str, int]:
    """The listener's part of the handshake: (link, role, index); call `settle` next. Raises FrameError or Closed; then
    the caller gets the reason and the link is closed.
    """
    link = Link(sock)
    deadline = threading.Timer(HANDSHAKE_SECONDS, link.cut)  # for the whole handshake: a peer may send slowly
    deadline.start()
    try:
        _limit_waits(sock, HANDSHAKE_SECONDS)
        hello = _expect(link, Hello)
        link.send(message.encode(listener.challenge(hello)))
        listener.check(hello, _expect(link, Proof))
        link.send(message.encode(Accept()))
    except BaseException as error:
        if isinstance(error, FrameError):
            with contextlib.suppress(Closed):
                link.send(message.encode(Refuse(str(error))))
                _drain(sock)
        link.close()
        raise
    finally:
        deadline.cancel()
    return link, hello.role, hello.index


def _expect(link: Link, wanted: type[Handshake]) -> Handshake:
    header = link.read_header()
    if header.kind not in (wanted.kind, Kind.REFUSE):
        raise FrameError(f"frame kind {header.kind} during the handshake, expected {wanted.kind.name}")
    found = link.read_message(header, wire.MAX_HELLO)
    if isinstance(found, Refuse):
        raise FrameError(f"refused: {found.reason[:500]!r}")
    return message.expect(found, wanted)


def _drain(sock: socket.socket) -> None:
    """Read what a refused caller has already sent. Closing a socket with unread bytes would reset the connection, and
    the caller might not receive the reason."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        _limit_waits(sock, DRAIN_SECONDS)
        for _ in range(DRAIN_READS):
            if not sock.recv(AHEAD_BYTES):
                return


def _limit_waits(sock: socket.socket, seconds: float) -> None:
    """Set a time limit for each blocking call, in the kernel: a Python timeout makes the socket non-blocking, without
    MSG_WAITALL."""
    sock.settimeout(None)
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)


def _inside_host(sock: socket.socket) -> bool:
    """Whether the peer of a connected TCP socket is on this host."""
    try:
        own, other = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # already cut
        return False
    return bool(own == other or other.startswith("127."))


def tune(sock: socket.socket, host: str) -> None:
    """Settings that must be made before connecting or listening; accepted sockets inherit them.

    On loopback, congestion control with pacing (BBR) only costs time, so loss-based algorithms are used there.
    """
    if not host.startswith("127."):
        return
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            return sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
