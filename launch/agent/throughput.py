"""Throughput of TCP between this host and another, both directions at once, as in training.

Made with an address, a `Throughput` listens there, on a port of the kernel's choice. `begin(peer)` connects to the
peer's, STREAMS times, as one stream may take a second to find its speed against the traffic that comes back. On each
the two prove who they are with words as in `launch.agent.reach`, and then each sends zeros for SECONDS or BYTES,
whichever is first. Each direction is timed where it arrives, without its first part. The one that was called ends
with what it has found, in FOUND_BYTES, so that the caller knows both. Above some Gbit/s these two processes, not the
network, are the limit.

No threads, no blocking calls: watch `fileno()`, and `poll()` then and at `deadline`.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import statistics
import time
from abc import ABC, abstractmethod
from typing import Any

from launch.agent.outcome import SILENT, TIMED_OUT, UNAUTHENTICATED
from launch.agent.reach import WORD_BYTES, word, words
from launch.agent.spawn import bound_socket

SECONDS, BYTES = 0.5, 32 << 20  # of sending, each way, by all streams
STREAMS = 8
LONGEST_SECONDS = 5.0  # for all of a measurement
BACKLOG = 64
FOUND_BYTES = 20
CHUNK = 1 << 18  # bytes of one call to the kernel
CALLS = 8  # of them before the other events are handled
NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # limits what a slow link still has to carry after the end
UNCOUNTED = 0.4  # of the time
SLICES, SAMPLES = 6, 100  # of the rest, where so many calls to the kernel got something
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
ZEROS, INTO = bytes(CHUNK), memoryview(bytearray(CHUNK))  # the content is ignored


class Throughput:
    """`host` is this host's name in the job and `token` the secret of the job's agents.

    OSError when it cannot listen on `address`. After `begin`, `poll()` gives once {"peer", "out", "back": bits/s out
    of this host and into it}, or {"peer", "error": words}.
    """

    def __init__(self, address: str, token: str, host: str, longest: float = LONGEST_SECONDS):
        self.token, self.host, self.longest = token, host, longest
        self.selector = selectors.DefaultSelector()
        self.streams: list[Stream] = []
        self.calls: list[Call] = []
        self.arrived: list[tuple[float, int]] = []  # s, bytes in the answers that are under way
        self.peer = ""
        self.listener = bound_socket(address, 0)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.selector.register(self.listener, READ, lambda mask: self._accept())

    def fileno(self) -> int:
        """Readable when there is something to do for `poll`."""
        return self.selector.fileno()

    @property
    def deadline(self) -> float:
        """When, in seconds of time.monotonic(), to call `poll` without an event."""
        return min((each.deadline for each in self.streams), default=float("inf"))

    def begin(self, name: str, address: str, port: int) -> None:
        """Measure with the host `name`."""
        self.peer = name
        said = word(self.token, "<", name), word(self.token, ">", name)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        arrived: list[tuple[float, int]] = []
        self.calls = [
            Call(self.selector, socket.socket(family, socket.SOCK_STREAM), *said, arrived, self.longest)
            for _ in range(STREAMS)
        ]
        self.streams += self.calls
        for call in self.calls:
            call.connect(address, port)

    def poll(self) -> dict[str, Any] | None:
        """Handle the events that are due; the result of the last `begin`, once."""
        for key, mask in self.selector.select(0):
            key.data(mask)
        for stream in [each for each in self.streams if each.over or time.monotonic() >= each.deadline]:
            stream.close()
            self.streams.remove(stream)
        if not self.calls or not all(call.over for call in self.calls):
            return None
        errors = [call.error for call in self.calls if call.error]
        out, back = max(call.found for call in self.calls), rate(self.calls[0].arrived)
        self.calls = []
        return {"peer": self.peer, **({"error": errors[0]} if errors else {"out": out, "back": back})}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again
            connection, _ = self.listener.accept()
            if not any(isinstance(each, Answer) for each in self.streams):
                self.arrived = []
            said = word(self.token, ">", self.host), word(self.token, "<", self.host)
            answer = Answer(self.selector, connection, *said, self.arrived, self.longest)
            answer.watch(READ)
            self.streams.append(answer)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.selector.close()
        self.listener.close()


class Stream(ABC):
    """One end of a connection: says its word and hears the other's, then sends zeros and counts what comes.

    `arrived` has [(s, bytes)] of all that came over this and the streams beside it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        own: bytes,
        expected: bytes,
        arrived: list[tuple[float, int]],
        longest: float,
    ):
        self.selector, self.socket = selector, connection
        self.expected, self.arrived = expected, arrived
        self.words = memoryview(own)  # to be sent before anything else
        self.deadline = time.monotonic() + longest
        self.until: float | None = None  # when to stop sending; None before the other is known
        self.sent, self.heard, self.last = 0, b"", b""
        self.sending = self.coming = True
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
                    self.fail(words(error.errno))

    def receive(self) -> None:
        if self.until is None:
            return self._meet(self.socket.recv(WORD_BYTES - len(self.heard)))
        for _ in range(CALLS):
            count = self.socket.recv_into(INTO)
            if not count:
                self.coming = False
                return self.all_came()
            self.last = (self.last + bytes(INTO[max(0, count - FOUND_BYTES) : count]))[-FOUND_BYTES:]
            if count > FOUND_BYTES:  # the result follows when the other direction is done
                self.arrived.append((time.monotonic(), count))

    def _meet(self, said: bytes) -> None:
        self.heard += said
        if not said or not self.expected.startswith(self.heard):
            return self.fail(UNAUTHENTICATED)
        if len(self.heard) == WORD_BYTES:
            self.until = time.monotonic() + SECONDS
            self.watch(READ | WRITE)

    def send(self) -> None:
        if self.words:
            self.words = self.words[self.socket.send(self.words) :]
            return self.said() if not self.words else None
        assert self.until is not None  # once the own word is said, writing is watched only after the other's
        for _ in range(CALLS):
            if time.monotonic() >= self.until or self.sent >= BYTES // STREAMS:
                self.sending = False
                return self.all_sent()
            self.sent += self.socket.send(ZEROS)

    @abstractmethod
    def said(self) -> None:
        """All `words` are sent."""

    @abstractmethod
    def all_sent(self) -> None:
        """This end sends no more zeros."""

    @abstractmethod
    def all_came(self) -> None:
        """The other end sends no more."""

    @abstractmethod
    def fail(self, error: str) -> None:
        """Give this connection up."""

    def close(self) -> None:
        self.over = True
        if self.socket in self.selector.get_map():
            self.selector.unregister(self.socket)
        self.socket.close()


class Call(Stream):
    """The calling end; once over, it has `found` what the other received in bits/s, or an `error`."""

    found, error = 0, TIMED_OUT

    def connect(self, address: str, port: int) -> None:
        self.watch(WRITE)
        error = self.socket.connect_ex((address, port))
        if error not in (0, errno.EINPROGRESS):
            self.fail(words(error))

    def said(self) -> None:
        self.error = SILENT
        self.watch(READ)

    def all_sent(self) -> None:
        self.error = TIMED_OUT
        self.watch(READ)
        self.socket.shutdown(socket.SHUT_WR)

    def all_came(self) -> None:
        said = self.last.strip()
        if not said.isdigit():
            return self.fail(UNAUTHENTICATED)
        self.found, self.error, self.over = int(said), "", True

    def fail(self, error: str) -> None:
        self.error, self.over = error, True


class Answer(Stream):
    """The called end: when all data has arrived, it sends what it has measured."""

    def said(self) -> None:
        self.over = not self.sending and not self.coming

    def all_sent(self) -> None:
        self.watch(READ)
        self._tell()

    def all_came(self) -> None:
        self.watch(WRITE)
        self._tell()

    def _tell(self) -> None:
        if not self.sending and not self.coming:
            self.words = memoryview(b"%*d" % (FOUND_BYTES, rate(self.arrived)))
            self.watch(WRITE)

    def fail(self, error: str) -> None:
        self.over = True


def rate(arrived: list[tuple[float, int]]) -> int:
    """bits/s of [(s, bytes)] without the UNCOUNTED beginning, until SECONDS; 0 where nothing can be said.

    It is the median over SLICES of that time, as a process that has to wait for a core finds much at once afterwards;
    the mean where that wait may be most of it, as all is there in a moment.
    """
    if not arrived:
        return 0
    counted = [each for each in arrived if each[0] <= arrived[0][0] + SECONDS]
    if len(counted) < 2:  # a link so slow that hardly anything came in time
        counted = arrived
    began, end = counted[0][0], counted[-1][0]
    start = began + UNCOUNTED * (end - began)
    slices = SLICES if end - began > SECONDS / 2 and len(counted) >= SAMPLES else 1
    seconds = (end - start) / slices
    if seconds <= 0:
        return 0
    totals = [0] * slices
    for at, count in counted:
        if at > start:
            totals[min(slices - 1, int((at - start) / seconds))] += count
    return int(8 * (statistics.median(totals) or sum(totals) / slices) / seconds)
