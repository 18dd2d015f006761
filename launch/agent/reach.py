"""Whether the addresses of a job's hosts are reached from each other: every agent tries every other's.

Made with an address, a `Reach` listens there, on a port of the kernel's choice. Once all agents do, `begin(peers)`
connects to all of them at once. A short exchange makes sure that what answers is the agent of that host in this job:
    the one that connects      sha256(token "?" name of the host it means), 64 hex digits
    the one that listens       sha256(token "!" its own name), 64 hex digits; nothing to one that asked for another
so neither an unauthenticated peer nor another host with the same address is taken for the peer.

No threads, no blocking calls: watch `fileno()`, and `poll()` then and at `deadline`. It keeps answering the
others after its own result, until `close()`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from launch.agent.commands import Peer
from launch.agent.outcome import NO_ROUTE, REFUSED, SILENT, TIMED_OUT, UNAUTHENTICATED
from launch.agent.spawn import bound_socket

SECONDS = 3.0  # a lost SYN is repeated after 1 s
WORD_BYTES = 64
BACKLOG = 1024  # connections: all hosts ask at once
WORDS = {
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

    OSError when it cannot listen on `address`. `poll()` gives {peer: {"ms": round trip} or {"error": words}}.
    """

    def __init__(self, address: str, token: str, host: str):
        self.token, self.answer = token, word(token, "!", host)
        self.expected = word(token, "?", host)
        self.selector = selectors.DefaultSelector()
        self.result: dict[str, dict[str, float | str]] | None = None
        self.calls: list[Call] = []
        self.deadline = float("inf")  # s of time.monotonic(): when to call `poll` without an event
        self.listener = bound_socket(address, 0)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def fileno(self) -> int:
        """Readable when there is something to do for `poll`."""
        return self.selector.fileno()

    def begin(self, peers: Sequence[Peer], seconds: float = SECONDS) -> None:
        """Try to reach each of `peers` within `seconds`."""
        now = time.monotonic()
        self.result, self.deadline = {}, now + (seconds if peers else 0)
        self.calls = [Call(self.selector, self.token, *peer) for peer in peers]

    def poll(self) -> dict[str, dict[str, float | str]] | None:
        """Handle the events that are due; the result, once every peer has answered or its time has passed."""
        for key, _ in self.selector.select(0):
            key.data()
        if self.result is None:
            return None
        for call in self.calls:
            if time.monotonic() >= self.deadline:
                call.give_up()
            if call.outcome:
                self.result[call.name] = call.outcome
        if len(self.result) < len(self.calls):
            return None
        self.deadline = float("inf")
        return self.result

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the peer is gone, or no descriptor is left: the peer times out
            asking, _ = self.listener.accept()
            asking.setblocking(False)
            self.selector.register(asking, selectors.EVENT_READ, lambda: self._reply(asking))

    def _reply(self, asking: socket.socket) -> None:
        """An agent's word fits into one segment: a part of it is not an agent's."""
        with contextlib.suppress(OSError):
            if asking.recv(WORD_BYTES) == self.expected:
                asking.send(self.answer)
        self._forget(asking)

    def _forget(self, asking: socket.socket) -> None:
        self.selector.unregister(asking)
        asking.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):  # all are
                key.fileobj.close()
        self.selector.close()


class Call:
    """One attempt to reach a peer; `outcome` once it is known."""

    def __init__(self, selector: selectors.BaseSelector, token: str, name: str, address: str, port: int):
        self.selector, self.name = selector, name
        self.question, self.answer = word(token, "?", name), word(token, "!", name)
        self.outcome: dict[str, float | str] | None = None
        self.connected = False
        self.began = time.monotonic()
        self.socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        selector.register(self.socket, selectors.EVENT_WRITE, self._connected)
        error = self.socket.connect_ex((address, port))
        if error not in (0, errno.EINPROGRESS):
            self._end(error=words(error))

    def _connected(self) -> None:
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return self._end(error=words(code))
        self.connected = True
        try:
            self.socket.send(self.question)
        except OSError as error:
            return self._end(error=words(error.errno))
        self.selector.modify(self.socket, selectors.EVENT_READ, self._answered)

    def _answered(self) -> None:
        try:
            said = self.socket.recv(WORD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            return self._end(error=words(error.errno))
        self._end(ms=self._milliseconds()) if said == self.answer else self._end(error=UNAUTHENTICATED)

    def _milliseconds(self) -> float:
        """The shortest round trip that the kernel saw; where it does not say, by the clock of this busy process."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT + 4)
        shortest = struct.unpack_from("=I", info, MIN_RTT)[0] if len(info) >= MIN_RTT + 4 else 0
        return round(shortest / 1000 if shortest else (time.monotonic() - self.began) * 1000, 3)

    def give_up(self) -> None:
        if not self.outcome:
            self._end(error=SILENT if self.connected else TIMED_OUT)

    def _end(self, **outcome: float | str) -> None:
        self.outcome = outcome
        self.selector.unregister(self.socket)
        self.socket.close()


def word(token: str, kind: str, name: str) -> bytes:
    return hashlib.sha256(f"{token}{kind}{name}".encode(errors="backslashreplace")).hexdigest().encode()


def words(error: int | None) -> str:
    """The errno of an OSError as it is shown in a table."""
    number = error or 0
    return WORDS.get(number, os.strerror(number))
