"""Whether the hosts of a job reach each other at their addresses: every agent connects to every other agent.

A `Reach` listens at the given address, on a port that the kernel chooses. Once all agents listen, `begin(peers)`
connects to all of them at once. A short exchange proves that the peer is the agent of that host in this job:
    the connecting agent       sha256(token "?" name of the peer's host), 64 hex digits
    the listening agent        sha256(token "!" its own name), 64 hex digits; NOT_MEANT if another host was meant
Both an unauthenticated peer and another host with the same address fail this exchange. When the other side closes a
connection without an answer, the agent connects again until its time is over: the other side may have had too many
callers.

No threads, no blocking calls: call `poll()` when `fileno()` is readable, and at `deadline`. It answers the other agents
until `close()`, also after its own result.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from dmltrain_launch.agent.commands import Peer
from dmltrain_launch.agent.network.outcome import NO_ROUTE, REFUSED, SILENT, TIMED_OUT, UNAUTHENTICATED
from dmltrain_launch.agent.network.unauthenticated import Unauthenticated
from dmltrain_launch.agent.ports import bound_socket

SECONDS = 3.0  # a lost SYN is repeated after 1 s
PROOF_BYTES = 64
NOT_MEANT = b"another host or job"
AGAIN_SECONDS = 0.1  # between two attempts to reach a peer
BACKLOG = 1024  # connections: all hosts connect at once
ERROR_TEXTS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: TIMED_OUT,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
    errno.EADDRNOTAVAIL: NO_ROUTE,
    errno.EACCES: "forbidden by a firewall here",
    errno.EPERM: "forbidden by a firewall here",
    errno.ECONNRESET: UNAUTHENTICATED,
    errno.EPIPE: UNAUTHENTICATED,
}
MIN_RTT = 148  # offset in bytes of tcpi_min_rtt (u32, microseconds) in struct tcp_info, linux/tcp.h; since Linux 4.6


class Reach:
    """`host` is this host's name in the job and `token` the secret of the job's agents.

    OSError when it cannot listen on `address`. `poll()` gives {peer: {"ms": round trip} or {"error": text}}.
    """

    def __init__(
        self,
        address: str,
        token: str,
        host: str,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ):
        self.token, self.answer = token, proof(token, "!", host)
        self.expected = proof(token, "?", host)
        self.clock = clock
        self.selector = selectors.DefaultSelector()
        self.unauthenticated = Unauthenticated(self.selector, self._reply, clock, chance or random.SystemRandom())
        self.result: dict[str, dict[str, float | str]] | None = None
        self.connections: list[Connection] = []
        self.until = float("inf")  # when those without an outcome give up
        self.listener = bound_socket(address, 0)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.selector.register(self.listener, selectors.EVENT_READ, lambda: self.unauthenticated.accept(self.listener))

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self.selector.fileno()

    @property
    def deadline(self) -> float:
        """When, in seconds of the clock, to call `poll` without an event."""
        return min(self.until, self.unauthenticated.deadline, *(connection.again_at for connection in self.connections))

    def begin(self, peers: Sequence[Peer], seconds: float = SECONDS) -> None:
        """Try to reach each of `peers` within `seconds`."""
        self.result, self.until = {}, self.clock() + (seconds if peers else 0)
        self.connections = [Connection(self.selector, self.clock, self.token, *peer) for peer in peers]
        for connection in self.connections:
            connection.connect()

    def poll(self) -> dict[str, dict[str, float | str]] | None:
        """Handle the events that are due. Returns the result once every peer has answered or timed out."""
        for key, _ in self.selector.select(0):
            key.data()
        self.unauthenticated.expire()
        if self.result is None:
            return None
        now = self.clock()
        for connection in self.connections:
            if now >= self.until:
                connection.give_up()
            elif now >= connection.again_at:
                connection.connect()
            if connection.outcome:
                self.result[connection.name] = connection.outcome
        if len(self.result) < len(self.connections):
            return None
        self.until = float("inf")
        return self.result

    def _reply(self, connection: socket.socket) -> None:
        """An agent's proof fits into one segment, so a shorter one is not from an agent."""
        with contextlib.suppress(OSError):
            received = connection.recv(PROOF_BYTES)
            if received == self.expected:
                connection.send(self.answer)
            elif len(received) == PROOF_BYTES:  # so that the caller does not try again
                connection.send(NOT_MEANT)
        self.unauthenticated.forget(connection)

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):  # always true; for the type checker
                key.fileobj.close()
        self.selector.close()


class Connection:
    """A connection to a peer; `outcome` is None until it is known."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        token: str,
        name: str,
        address: str,
        port: int,
    ):
        self.selector, self.clock, self.name, self.address = selector, clock, name, (address, port)
        self.request, self.answer = proof(token, "?", name), proof(token, "!", name)
        self.outcome: dict[str, float | str] | None = None
        self.again_at = float("inf")  # when to connect again
        self.error = TIMED_OUT  # if the time ends now
        self.socket: socket.socket | None = None

    def connect(self) -> None:
        self.again_at = float("inf")
        self.began = self.clock()
        self.socket = socket.socket(socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.selector.register(self.socket, selectors.EVENT_WRITE, self._connected)
        error = self.socket.connect_ex(self.address)
        if error not in (0, errno.EINPROGRESS):
            self._end(error=error_text(error))

    def _connected(self) -> None:
        assert self.socket
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return self._fail(code)
        if self.error == TIMED_OUT:
            self.error = SILENT
        try:
            self.socket.send(self.request)
        except OSError as error:
            return self._fail(error.errno)
        self.selector.modify(self.socket, selectors.EVENT_READ, self._answered)

    def _answered(self) -> None:
        assert self.socket
        try:
            received = self.socket.recv(PROOF_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            return self._fail(error.errno)
        if not received:
            return self._fail(errno.EPIPE)
        self._end(ms=self._milliseconds()) if received == self.answer else self._end(error=UNAUTHENTICATED)

    def _fail(self, code: int | None) -> None:
        """Try again if the other side closed the connection, else end."""
        if code not in (errno.ECONNRESET, errno.EPIPE):
            return self._end(error=error_text(code))
        self.error = UNAUTHENTICATED
        self.again_at = self.clock() + AGAIN_SECONDS
        self._close()

    def _milliseconds(self) -> float:
        """The shortest round trip that the kernel measured; if unknown, the time that this busy process measured."""
        assert self.socket
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT + 4)
        shortest = struct.unpack_from("=I", info, MIN_RTT)[0] if len(info) >= MIN_RTT + 4 else 0
        return round(shortest / 1000 if shortest else (self.clock() - self.began) * 1000, 3)

    def give_up(self) -> None:
        if not self.outcome:
            self._end(error=self.error)

    def _end(self, **outcome: float | str) -> None:
        self.outcome, self.again_at = outcome, float("inf")
        self._close()

    def _close(self) -> None:
        if self.socket:
            self.selector.unregister(self.socket)
            self.socket.close()
            self.socket = None


def proof(token: str, kind: str, name: str) -> bytes:
    return hashlib.sha256(f"{token}{kind}{name}".encode(errors="backslashreplace")).hexdigest().encode()


def error_text(error: int | None) -> str:
    """The text of an errno for a table."""
    number = error or 0
    return ERROR_TEXTS.get(number, os.strerror(number))
