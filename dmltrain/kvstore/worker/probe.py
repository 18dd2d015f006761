"""How fast this host's links to the servers and its memory are, measured once before training: the limits that an
epoch's communication is held against (bound.py).

For SECONDS all workers flood all servers over TCP with PROBE frames, which the servers send back, so that every card is
busy in both directions, with the job's own pattern of traffic. What comes back between WARM_UP and the end counts: it
went both ways. No more than WINDOW frames a link are on their way, and frames grow with what a link carries, so a slow
link is quiet again soon, and a fast one is not held up by their number.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from dmltrain.kvstore.transport.outbox import LAST, Frame
from dmltrain.kvstore.transport.wire import MAX_PROBE, Header, Kind
from dmltrain.kvstore.worker.server_link import ServerLink

SECONDS = 0.4
WARM_UP = 0.1  # s; until as much comes back as goes out
WINDOW = 8  # frames
LEAST_BYTES = 1 << 15  # of a frame; a window of them takes 0.1 s at 20 Mbit/s
FRAME_SECONDS = 0.005  # that a link takes for a frame, as far as MAX_PROBE allows: a window is short against
#                        SECONDS, so that as much comes back as goes out
QUIET_SECONDS = 10.0  # for frames under way to come back
MEMORY_BYTES = 1 << 25  # copied at once; more than caches hold
COPIES = 5


class Flood:
    """Frames to and fro on one link."""

    def __init__(self, server: ServerLink, payload: memoryview, clock: Callable[[], float] = time.perf_counter) -> None:
        self._server, self._payload, self._clock = server, payload, clock
        self._left, self._bytes, self._before = WINDOW, 0, 0  # bytes that count, and those before
        self._start = clock()
        self._quiet = threading.Event()
        server.echoed = self._echoed
        server.outbox.put_all([self._frame(LEAST_BYTES) for _ in range(WINDOW)])

    def rate(self) -> float:
        """Bytes/s that went each way, when all is quiet again; 0 where nothing came back."""
        self._quiet.wait(SECONDS + QUIET_SECONDS)
        return self._bytes / (SECONDS - WARM_UP)

    def _frame(self, size: int) -> Frame:
        return Frame(Header(Kind.PROBE, size).pack(), self._payload[:size], LAST)

    def _fitting(self, passed: float) -> int:
        """Bytes of the next frame."""
        rate = (self._before + self._bytes) / passed if passed > WARM_UP / 2 else 0.0
        return min(MAX_PROBE, max(LEAST_BYTES, int(rate * FRAME_SECONDS)))

    def _echoed(self, size: int) -> None:
        """Called on the link's receiving thread."""
        passed = self._clock() - self._start
        if passed < WARM_UP:
            self._before += size
        elif passed < SECONDS:
            self._bytes += size
        if passed < SECONDS:
            return self._server.outbox.put_all([self._frame(self._fitting(passed))])
        self._left -= 1
        if not self._left:
            self._quiet.set()


def link_rates(servers: Sequence[ServerLink], meet: Callable[[], None]) -> list[float]:
    """Bytes/s that each of these links carries each way, all at once. All workers call it; `meet` waits for all."""
    payload = memoryview(os.urandom(MAX_PROBE))  # a tunnel may compress zeros
    meet()
    return [flood.rate() for flood in [Flood(server, payload) for server in servers]]


def memory_rate() -> float:
    """Bytes/s that one thread reads and writes together: memcpy's rate, twice. Takes about 20 ms."""
    source, target = np.ones(MEMORY_BYTES, np.uint8), np.ones(MEMORY_BYTES, np.uint8)
    took = []
    for _ in range(COPIES):
        since = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - since)
    return 2 * MEMORY_BYTES / min(took)
