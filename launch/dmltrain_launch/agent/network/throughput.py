"""TCP throughput between this host and another, in both directions at once, as in training.

A `Throughput` listens at the given address, on a port that the kernel chooses. `begin(peer)` opens STREAMS connections
to the peer: one stream alone may need a second to reach its full speed against the traffic of the other direction. On
each connection both sides authenticate as in reach.py. Then each sends zeros until SECONDS have passed or
BYTES are sent. The receiver of each direction measures its rate, without the start. At the end the accepting side
sends its result, in RESULT_BYTES, so that the connecting side knows both. Above some Gbit/s these two processes limit
the throughput, not the network.

No threads, no blocking calls: call `poll()` when `fileno()` is readable, and at `deadline`.
"""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import statistics
import time
from abc import ABC, abstractmethod
from typing import Any

from dmltrain_launch.agent.network import unauthenticated
from dmltrain_launch.agent.network.outcome import SILENT, TIMED_OUT, UNAUTHENTICATED
from dmltrain_launch.agent.network.reach import PROOF_BYTES, error_text, proof
from dmltrain_launch.agent.ports import bound_socket

SECONDS, BYTES = 0.5, 32 << 20  # of sending, each way, by all streams
STREAMS = 8
LIMIT_SECONDS = 5.0  # for a whole measurement
BACKLOG = 1024
RESULT_BYTES = 20
CHUNK = 1 << 18  # bytes of one call to the kernel
CALLS = 8  # calls to the kernel before other events are handled
NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # limits the queue that a slow link still has to send at the end
UNCOUNTED = 0.4  # of the time, at the start
INTERVALS, SAMPLES = 6, 100  # the rest is divided into so many intervals if at least SAMPLES calls received data
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
ZEROS, BUFFER = bytes(CHUNK), memoryview(bytearray(CHUNK))  # received content is ignored


class Throughput:
    """`host` is this host's name in the job and `token` the secret of the job's agents.

    OSError when it cannot listen on `address`. After `begin`, `poll()` returns once {"peer", "out", "back"}, with the
    bits/s out of this host and into it, or {"peer", "error": text}.
    """

    def __init__(self, address: str, token: str, host: str, limit: float = LIMIT_SECONDS):
        self.token, self.host, self.limit = token, host, limit
        self.selector = selectors.DefaultSelector()
        self.streams: list[Stream] = []
        self.connections: list[Connecting] = []
        self.arrived: list[tuple[float, int]] = []  # (s, bytes) on the accepted connections of this measurement
        self.peer = ""
        self.listener = bound_socket(address, 0)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.selector.register(self.listener, READ, lambda mask: self._accept())

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self.selector.fileno()

    @property
    def deadline(self) -> float:
        """When, in seconds of time.monotonic(), to call `poll` without an event."""
        return min((stream.deadline for stream in self.streams), default=float("inf"))

    def begin(self, name: str, address: str, port: int) -> None:
        """Measure with the host `name`."""
        self.peer = name
        proofs = proof(self.token, "<", name), proof(self.token, ">", name)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        arrived: list[tuple[float, int]] = []
        self.connections = [
            Connecting(self.selector, socket.socket(family, socket.SOCK_STREAM), *proofs, arrived, self.limit)
            for _ in range(STREAMS)
        ]
        self.streams += self.connections
        for connection in self.connections:
            connection.connect(address, port)

    def poll(self) -> dict[str, Any] | None:
        """Handle the events that are due. Returns the result of the last `begin`, once."""
        for key, mask in self.selector.select(0):
            key.data(mask)
        for stream in [stream for stream in self.streams if stream.over or time.monotonic() >= stream.deadline]:
            stream.close()
            self.streams.remove(stream)
        if not self.connections or not all(connection.over for connection in self.connections):
            return None
        errors = [connection.error for connection in self.connections if connection.error]
        out, back = max(connection.result for connection in self.connections), rate(self.connections[0].arrived)
        self.connections = []
        return {"peer": self.peer, **({"error": errors[0]} if errors else {"out": out, "back": back})}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the peer is gone again
            connection, _ = self.listener.accept()
            if not any(isinstance(stream, Accepting) for stream in self.streams):
                self.arrived = []
            proofs = proof(self.token, ">", self.host), proof(self.token, "<", self.host)
            accepted = Accepting(self.selector, connection, *proofs, self.arrived, self.limit)
            accepted.deadline = min(accepted.deadline, time.monotonic() + unauthenticated.SECONDS)
            accepted.watch(READ)
            self._make_room()
            self.streams.append(accepted)

    def _make_room(self) -> None:
        """Close a random unauthenticated connection if there are many."""
        unknown = [stream for stream in self.streams if isinstance(stream, Accepting) and stream.until is None]
        if len(unknown) >= unauthenticated.MAX:
            unlucky = random.choice(unknown)
            unlucky.close()
            self.streams.remove(unlucky)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.selector.close()
        self.listener.close()


class Stream(ABC):
    """One end of a connection: authenticates, then sends zeros and counts what arrives.

    `arrived` is the list of (s, bytes) that all streams of this measurement share.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        own: bytes,
        expected: bytes,
        arrived: list[tuple[float, int]],
        limit: float,
    ):
        self.selector, self.socket = selector, connection
        self.expected, self.arrived = expected, arrived
        self.message = memoryview(own)  # to be sent before any zeros
        self.deadline = self.end = time.monotonic() + limit
        self.until: float | None = None  # when to stop sending; None before the peer is authenticated
        self.sent, self.peer_proof, self.last = 0, b"", b""
        self.sending = self.receiving = True
        self.over = False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, NOT_SENT, CHUNK)

    def watch(self, mask: int) -> None:
        """Wait for these events from now on; 0 for none."""
        if self.socket not in self.selector.get_map():
            self.selector.register(self.socket, mask, self.ready)
        elif mask:
            self.selector.modify(self.socket, mask, self.ready)
        else:
            self.selector.unregister(self.socket)

    def ready(self, mask: int) -> None:
        for event, act in ((READ, self.receive), (WRITE, self.send)):
            if mask & event and not self.over:
                try:
                    act()
                except BlockingIOError:
                    pass
                except OSError as error:
                    self.fail(error_text(error.errno))

    def receive(self) -> None:
        if self.until is None:
            return self._authenticate(self.socket.recv(PROOF_BYTES - len(self.peer_proof)))
        for _ in range(CALLS):
            count = self.socket.recv_into(BUFFER)
            if not count:
                self.receiving = False
                return self.all_received()
            self.last = (self.last + bytes(BUFFER[max(0, count - RESULT_BYTES) : count]))[-RESULT_BYTES:]
            if count > RESULT_BYTES:  # the result follows when the other direction is done
                self.arrived.append((time.monotonic(), count))

    def _authenticate(self, data: bytes) -> None:
        self.peer_proof += data
        if not data or not self.expected.startswith(self.peer_proof):
            return self.fail(UNAUTHENTICATED)
        if len(self.peer_proof) == PROOF_BYTES:
            self.until, self.deadline = time.monotonic() + SECONDS, self.end
            self.watch(READ | WRITE)

    def send(self) -> None:
        if self.message:
            self.message = self.message[self.socket.send(self.message) :]
            return self.message_sent() if not self.message else None
        assert self.until is not None  # after its own proof it waits for the peer's before it writes
        for _ in range(CALLS):
            if time.monotonic() >= self.until or self.sent >= BYTES // STREAMS:
                self.sending = False
                return self.all_sent()
            self.sent += self.socket.send(ZEROS)

    @abstractmethod
    def message_sent(self) -> None:
        """The whole `message` is sent."""

    @abstractmethod
    def all_sent(self) -> None:
        """This end has sent all its zeros."""

    @abstractmethod
    def all_received(self) -> None:
        """The peer has sent everything."""

    @abstractmethod
    def fail(self, error: str) -> None:
        """Give up this connection."""

    def close(self) -> None:
        self.over = True
        if self.socket in self.selector.get_map():
            self.selector.unregister(self.socket)
        self.socket.close()


class Connecting(Stream):
    """The connecting end. Once over, `result` is the peer's receiving rate in bits/s, or `error` is a text."""

    result, error = 0, TIMED_OUT

    def connect(self, address: str, port: int) -> None:
        self.watch(WRITE)
        error = self.socket.connect_ex((address, port))
        if error not in (0, errno.EINPROGRESS):
            self.fail(error_text(error))

    def message_sent(self) -> None:
        self.error = SILENT
        self.watch(READ)

    def all_sent(self) -> None:
        self.error = TIMED_OUT
        self.watch(READ)
        self.socket.shutdown(socket.SHUT_WR)

    def all_received(self) -> None:
        result = self.last.strip()
        if not result.isdigit():
            return self.fail(UNAUTHENTICATED)
        self.result, self.error, self.over = int(result), "", True

    def fail(self, error: str) -> None:
        self.error, self.over = error, True


class Accepting(Stream):
    """The accepting end: after all data has arrived, it sends the rate that it measured."""

    def message_sent(self) -> None:
        self.over = not self.sending and not self.receiving

    def all_sent(self) -> None:
        self.watch(READ)
        self._send_result()

    def all_received(self) -> None:
        self.watch(WRITE)
        self._send_result()

    def _send_result(self) -> None:
        if not self.sending and not self.receiving:
            self.message = memoryview(b"%*d" % (RESULT_BYTES, rate(self.arrived)))
            self.watch(WRITE)

    def fail(self, error: str) -> None:
        self.over = True


def rate(arrived: list[tuple[float, int]]) -> int:
    """The rate in bits/s of [(s, bytes)], without the UNCOUNTED start, until SECONDS; 0 if unknown.

    It is the median over INTERVALS, because a process that waited for a core receives much data at once afterwards. If
    there are too few samples or most intervals are empty, it is the mean.
    """
    if not arrived:
        return 0
    counted = [each for each in arrived if each[0] <= arrived[0][0] + SECONDS]
    if len(counted) < 2:  # a link so slow that hardly anything arrived in time
        counted = arrived
    first, end = counted[0][0], counted[-1][0]
    start = first + UNCOUNTED * (end - first)
    intervals = INTERVALS if end - first > SECONDS / 2 and len(counted) >= SAMPLES else 1
    seconds = (end - start) / intervals
    if seconds <= 0:
        return 0
    totals = [0] * intervals
    for at, count in counted:
        if at > start:
            totals[min(intervals - 1, int((at - start) / seconds))] += count
    return int(8 * (statistics.median(totals) or sum(totals) / intervals) / seconds)
