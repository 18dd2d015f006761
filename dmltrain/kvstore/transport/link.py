"""Sockets: connect and accept with the handshake, read and write frames. Calls block; each link has one reading and one
writing thread.

Reads go directly into the caller's memory, with one system call for each slice (MSG_WAITALL). Writes gather frames
(outbox.py). A unix socket mostly carries headers, because payloads lie in shared memory (shared_memory.py); one read
takes several of them. `Link.cut` can be called from any thread: blocked calls return, and the reader raises Closed.

After the handshake, frames on TCP carry seals (seal.py), and with the level `tls` everything is encrypted (tls.py). A
unix socket needs neither: the kernel names the user at its other end, and nobody can come between.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from dmltrain.kvstore.transport import message, seal, send_window, wire
from dmltrain.kvstore.transport.address import family, is_loopback
from dmltrain.kvstore.transport.handshake import MEMORY, Caller
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.handshake import Accept, Challenge, Refuse
from dmltrain.kvstore.transport.seal import Keys, Seals
from dmltrain.kvstore.transport.send_window import SendWindow
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header

if TYPE_CHECKING:
    from dmltrain.kvstore.transport.shared_memory import Arena, Mapping

HANDSHAKE_SECONDS = 5.0  # time limit of a whole handshake
RETRY_SECONDS = 0.05  # between two attempts to connect
SHORTEST_SECONDS = 1e-3  # of a limited wait: less than a microsecond would be no limit
SOCKET_BUFFER = 1 << 20  # bytes; measured best on loopback
TCP_RTO_MAX_MS, RETRANSMIT_MS = 44, 1000  # linux/tcp.h; longest pause between two retransmissions
CHUNK = 1 << 20  # maximum bytes of one send call, so that they are still in the cache when the receiver reads them
AHEAD_BYTES = 1 << 16  # maximum of one read from a unix socket
MAX_VIEWS = 1024  # maximum of one send or receive call: IOV_MAX of Linux

Expected = TypeVar("Expected", Challenge, Accept)
Connected = TypeVar("Connected")


class Closed(Exception):
    """The peer closed the connection, or it was cut."""


class Stream(Protocol):
    """The bytes of a connection, in both directions. Both methods raise OSError."""

    def receive_into(self, target: memoryview) -> int:
        """Wait for at least one byte; returns how many; 0 at the end of the stream."""

    def send(self, views: Sequence[memoryview]) -> int:
        """Send a part of `views`, from the start; returns how many bytes of them."""


class PlainStream:
    """The bytes of a socket that is not encrypted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_into(self, target: memoryview) -> int:
        return self._sock.recv_into(target, len(target), socket.MSG_WAITALL)

    def send(self, views: Sequence[memoryview]) -> int:
        small = len(views) > 1 and len(views[0]) < CHUNK
        return self._sock.sendmsg(views[:MAX_VIEWS]) if small else self._sock.send(views[0][:CHUNK])


class Link:
    """One connection after its handshake."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._stream: Stream = PlainStream(sock)
        self._seals: Seals | None = None
        self._sealed = b""  # the header whose payload comes next, if the frame has a seal
        self._deadline = 0.0  # time.monotonic, of the handshake
        self.bytes_sent = 0  # handed to the socket, all of the frame that is being sent included
        self.bytes_received = 0
        self.own_arena: Arena | None = None  # memory that this side shares with the peer
        self.peer_arena: Mapping | None = None  # memory that the peer shares with this side; both are set, or none
        self.window: SendWindow | None = None  # only of a link between hosts
        self._header = bytearray(wire.HEADER_SIZE)
        self._reads_ahead = False
        self._ahead = memoryview(b"")
        self._send_lock = threading.Lock()

    def read_header(self) -> Header:
        """Raises Closed at the end of the stream, FrameError if the bytes are not a frame."""
        self._fill(memoryview(self._header))
        header = Header.unpack(self._header)
        if self._seals and self._seals.cover(self._header):
            self._sealed = bytes(self._header)
            if not header.is_followed:
                self._check_seal()
        return header

    def read_headers(self, most: int) -> list[Header]:
        """The next header and those already received, at most `most`, up to the first that a payload follows."""
        headers = [self.read_header()]
        while len(headers) < most and len(self._ahead) >= wire.HEADER_SIZE and not headers[-1].is_followed:
            headers.append(self.read_header())
        return headers

    def read_into(self, target: memoryview) -> None:
        """Fill `target` (bytes): the whole payload of the last header, if it has one. Raises Closed if the stream ends
        first, and FrameError if the frame is not the peer's."""
        self._fill(target)
        if self._sealed:
            self._check_seal(target)

    def read_parts(self, targets: Sequence[memoryview]) -> None:
        """`read_into` these, one after another."""
        for target in targets:
            self._fill(target)
        if self._sealed:
            self._check_seal(*targets)

    def _check_seal(self, *payload: memoryview) -> None:
        assert self._seals is not None  # see read_header
        received_seal, header, self._sealed = bytearray(seal.SIZE), self._sealed, b""
        self._fill(memoryview(received_seal))
        self._seals.check([header, *payload], received_seal)

    def _fill(self, target: memoryview) -> None:
        done, size = 0, len(target)
        if self._reads_ahead:
            if not self._ahead and 0 < size <= AHEAD_BYTES:
                self._read_ahead()
            done = min(size, len(self._ahead))
            target[:done] = self._ahead[:done]
            self._ahead = self._ahead[done:]
        while done < size:
            try:
                self._limit_wait()
                got = self._stream.receive_into(target[done:] if done else target)
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

    def discard(self, header: Header) -> None:
        """Read and drop the payload of `header`, the last header that was read. Raises like `read_into`."""
        received_seal = bytearray(seal.SIZE)
        pieces = self._pieces(header.length if header.is_followed else 0, self._sealed, received_seal)
        if self._sealed:
            assert self._seals is not None  # see read_header
            self._sealed = b""
            self._seals.check(pieces, received_seal)  # which reads them
        else:
            deque(pieces, 0)

    def _pieces(self, size: int, header: bytes, received_seal: bytearray) -> Iterator[bytes | memoryview]:
        """`header` and the `size` bytes after it, each piece valid until the next. After the last one `received_seal`
        is filled."""
        yield header
        memory = memoryview(bytearray(min(size, CHUNK)))
        for start in range(0, size, CHUNK):
            piece = memory[: size - start]
            self._fill(piece)
            yield piece
        if header:
            self._fill(memoryview(received_seal))

    def send(self, *frame: bytes | memoryview) -> None:
        """Send one frame, whose parts follow each other without a gap. Raises Closed."""
        self.send_all([frame])

    def send_all(self, frames: Sequence[Sequence[bytes | memoryview]]) -> None:
        """Send these in order, with nothing between them. Raises Closed."""
        with self._send_lock:
            self._send([memoryview(part).cast("B") for frame in frames for part in self._seal(frame) if len(part)])

    def _seal(self, frame: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        if self._seals and self._seals.cover(frame[0]):
            return [*frame, self._seals.seal(frame)]
        return frame

    def _send(self, views: list[memoryview]) -> None:
        # Count before sending: a thread that already has the answer must find the bytes counted.
        self.bytes_sent += sum(map(len, views))
        try:
            while views:
                sent = self._stream.send(views)
                if self.window:
                    self.window.sent(sent)
                whole = 0
                while whole < len(views) and sent >= len(views[whole]):
                    sent -= len(views[whole])
                    whole += 1
                del views[:whole]
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise Closed(str(error)) from error

    def send_now(self, data: bytes) -> int:
        """On a unix socket: send as many bytes as it accepts without blocking; returns how many. If the link is cut,
        returns len(data): the reading thread reports the loss."""
        with self._send_lock:
            sent = 0
            self.bytes_sent += len(data)  # before sending, as in _send
            try:
                sent = self.sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                self.cut()
                return len(data)
            finally:
                self.bytes_sent -= len(data) - sent
        return sent

    def limit(self, seconds: float) -> None:
        """From now on, and until `settle`, all that is read must arrive within this time."""
        self._deadline = time.monotonic() + seconds
        limit_waits(self.sock, seconds)

    def _limit_wait(self) -> None:
        if self._deadline:
            left = self._deadline - time.monotonic()
            if left <= 0.0:
                raise BlockingIOError
            limit_waits(self.sock, left)

    def protect(self, keys: Keys, level: str, listens: bool, certificate: str) -> None:
        """After the handshake of a TCP connection: protect all that follows. `certificate`: a file, for the level tls.
        Raises Closed, FrameError, UserError."""
        sending, receiving = (keys.listener, keys.caller) if listens else (keys.caller, keys.listener)
        self._seals = Seals(sending, receiving, every=level == "auth")
        if level == "tls":
            self._encrypt(keys.tls, listens, certificate)

    def _encrypt(self, key: bytes, listens: bool, certificate: str) -> None:
        from dmltrain.kvstore.transport import tls  # imports ssl, which takes 10 ms

        stream = tls.TlsStream(self.sock, tls.context(certificate, listens), listens, self._limit_wait)
        try:
            stream.handshake(key, listens)
        except BlockingIOError as error:
            raise Closed(f"silent for {HANDSHAKE_SECONDS:g} s during the TLS handshake") from error
        except OSError as error:
            raise Closed(f"TLS: {error}") from error
        self._stream = stream

    def settle(self, answers: bool = False) -> None:
        """Apply the settings for the time after the handshake. `answers`: whether this side only answers. Waits have no
        time limit from now on: heartbeats and data_links.py detect lost peers, and cut their links."""
        self._deadline = 0.0
        limit_waits(self.sock, 0)
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

    @property
    def has_ended(self) -> bool:
        """Whether the peer has closed the connection, and all that it sent has been read."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.sock.close()


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket. Raises OSError."""
    sock = socket.socket(family(host), socket.SOCK_STREAM)
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


def connect(address: tuple[str, int], caller: Caller, timeout: float, certificate: str = "") -> Link:
    """Connect and authenticate. Until `timeout` (s), tries again when the listener ends a handshake without an answer:
    it may be busy with unauthenticated peers. Raises OSError, Closed, or FrameError with the reason of a refusal."""
    return persist(lambda caller, seconds: _connect(address, caller, seconds, certificate), caller, timeout)


def persist(attempt: Callable[[Caller, float], Connected], caller: Caller, timeout: float) -> Connected:
    """The result of `attempt(caller, seconds left)`, which is repeated until `timeout` (s) if it raises Closed."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return attempt(caller, max(deadline - time.monotonic(), RETRY_SECONDS))
        except Closed:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise
            time.sleep(RETRY_SECONDS)
            caller = caller.again()


def _connect(address: tuple[str, int], caller: Caller, timeout: float, certificate: str) -> Link:
    sock = socket.socket(family(address[0]), socket.SOCK_STREAM)
    try:
        tune(sock, address[0])
        sock.settimeout(timeout)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    link = greet(sock, caller, min(timeout, HANDSHAKE_SECONDS), certificate)
    link.settle()
    return link


def greet(sock: socket.socket, caller: Caller, seconds: float | None = None, certificate: str = "") -> Link:
    """The caller's part of the handshake on a connected socket, within `seconds` (default: HANDSHAKE_SECONDS). Raises
    Closed, or FrameError with the reason of a refusal, and closes the socket."""
    link = Link(sock)
    try:
        link.limit(HANDSHAKE_SECONDS if seconds is None else seconds)
        link.send(message.encode(caller.hello()))
        challenge = _expect(link, Challenge)
        link.send(message.encode(caller.proof(challenge)))
        _expect(link, Accept)
        if caller.purpose != MEMORY:
            link.protect(caller.keys(challenge), caller.wire, listens=False, certificate=certificate)
    except BaseException:
        link.close()
        raise
    return link


def _expect(link: Link, wanted: type[Expected]) -> Expected:
    header = link.read_header()
    if header.kind not in (wanted.kind, FrameKind.REFUSE):
        raise FrameError(f"frame kind {header.kind} during the handshake, expected {wanted.kind.name}")
    answer = link.read_message(header, wire.MAX_HELLO)
    if isinstance(answer, Refuse):
        raise FrameError(f"refused: {answer.reason[:500]!r}")
    return message.expect(answer, wanted)


def limit_waits(sock: socket.socket, seconds: float) -> None:
    """Set a time limit for each blocking call, in the kernel: a Python timeout makes the socket non-blocking, without
    MSG_WAITALL. 0: no limit."""
    sock.settimeout(None)
    seconds = max(seconds, SHORTEST_SECONDS) if seconds else 0.0
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)


def _inside_host(sock: socket.socket) -> bool:
    """Whether the peer of a connected TCP socket is on this host."""
    try:
        own, other = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # already cut
        return False
    return bool(own == other or is_loopback(other))


def tune(sock: socket.socket, host: str) -> None:
    """Settings that must be made before connecting or listening; accepted sockets inherit them.

    On loopback, congestion control with pacing (BBR) only costs time, so loss-based algorithms are used there.
    """
    if not is_loopback(host):
        return
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            return sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
