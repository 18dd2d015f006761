"""Measures the bandwidth of this host's links to the servers and of its memory once before training, for bound.py.

For SECONDS all workers send PROBE frames to all servers over TCP, and the servers send them back. So every network card
is busy in both directions, with the job's pattern of traffic. Bytes that come back between WARM_UP and the end count,
for each direction. At most WINDOW frames per link are in flight, and their size grows with the link's bandwidth: a slow
link is idle again soon, and the number of frames does not limit a fast one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from dmltrain.kvstore.transport.outbox import LAST, Frame
from dmltrain.kvstore.transport.wire import MAX_PROBE, FrameKind, Header
from dmltrain.kvstore.worker.links.server_link import ServerLink

SECONDS = 0.4
WARM_UP = 0.1  # s; then both directions carry the same bytes
WINDOW = 8  # frames
MIN_BYTES = 1 << 15  # of a frame; a window of them takes 0.1 s at 20 Mbit/s
# Target duration of a frame on a link, within MAX_PROBE. So a window of frames is short compared with SECONDS, and both
# directions carry the same bytes.
FRAME_SECONDS = 0.005
QUIET_SECONDS = 10.0  # time limit for the last frames to come back
MEMORY_BYTES = 1 << 25  # of each copy; larger than caches
COPIES = 5


class Flood:
    """Frames in both directions on one link."""

    def __init__(self, server: ServerLink, payload: memoryview, clock: Callable[[], float] = time.perf_counter) -> None:
        self._server, self._payload, self._clock = server, payload, clock
        self._left = WINDOW  # frames in flight at the end
        self._bytes, self._before = 0, 0  # bytes after and before WARM_UP
        self._start = clock()
        self._quiet = threading.Event()
        server.echoed = self._echoed
        server.outbox.put_all([self._frame(MIN_BYTES) for _ in range(WINDOW)])

    def rate(self) -> float:
        """Wait until the link is idle. Returns bytes/s in each direction; 0 if nothing came back."""
        self._quiet.wait(SECONDS + QUIET_SECONDS)
        return self._bytes / (SECONDS - WARM_UP)

    def _frame(self, size: int) -> Frame:
        return Frame(Header(FrameKind.PROBE, size).pack(), self._payload[:size], LAST)

    def _fitting(self, passed: float) -> int:
        """Bytes of the next frame."""
        rate = (self._before + self._bytes) / passed if passed > WARM_UP / 2 else 0.0
        return min(MAX_PROBE, max(MIN_BYTES, int(rate * FRAME_SECONDS)))

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
    """Bytes/s of each link in each direction, all at once. Every worker must call this; `meet` is a barrier."""
    payload = memoryview(os.urandom(MAX_PROBE))  # a tunnel may compress zeros
    meet()
    return [flood.rate() for flood in [Flood(server, payload) for server in servers]]


def memory_rate() -> float:
    """Bytes/s that one thread reads and writes in total: twice memcpy's rate. Takes about 20 ms."""
    source, target = np.ones(MEMORY_BYTES, np.uint8), np.ones(MEMORY_BYTES, np.uint8)
    took = []
    for _ in range(COPIES):
        since = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - since)
    return 2 * MEMORY_BYTES / min(took)
