"""One stream per host: sums the pushes of a host's workers in memory that they share, and sends the sum to the servers
of other hosts on their behalf.

Theory of operation. The relay lives in the process of the host's first worker. To its workers it is a server (a Service
with a ServerCore of its own), reached through shared memory. When a round of a slice is complete it adds the pushes as
a server would, pushes the sum upstream by a link of its own (role "relay": that push counts for all its workers), and
lets the value that comes back land where the sum was: this is the round's value, read by the workers where it lies.
Gradients are compressed once, on their way upstream, and the residual belongs to the host.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from dmltrain.env import Environment
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.service import OVERDUE_SECONDS, Service, allocator
from dmltrain.kvstore.server.slice import Work
from dmltrain.kvstore.transport.host import Ranks
from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.outbox import Frame
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Flag, FrameError, Header
from dmltrain.kvstore.waiting import Trip
from dmltrain.kvstore.worker.outgoing import Outgoing
from dmltrain.kvstore.worker.server_link import Landing, ServerLink, WorkerSlice

LEAVE_SECONDS = 0.05  # between two looks whether the workers have left
LINGER_SECONDS = 2.0  # after a server's link broke, for the scheduler to report the lost process


class Relay:
    """Serves the workers `ranks` through `listening`. `lost(reason)` is called when a link has ended, for its worker;
    `fail(reason)` ends the job."""

    def __init__(
        self,
        environment: Environment,
        ranks: Ranks,
        arena: Arena,
        listening: socket.socket,
        lost: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        self.links: dict[int, ServerLink] = {}  # by server, to be filled before the first push
        self._slices: dict[tuple[int, int], WorkerSlice] = {}
        self._lost, self._fail = lost, fail
        self._left = threading.Event()
        core = ServerCore(environment.num_workers, wait_seconds=environment.wait_seconds, allocate=allocator(arena))
        core.on_hosts([ranks])
        self._service = Service(
            f"the relay of worker {ranks[0]}", environment, core, arena, fail, _refuse, self._forward
        )
        self._service.accept(listening)
        threading.Thread(target=self._watch, name="relay", daemon=True).start()

    def carry(self, slice_: WorkerSlice) -> None:
        """From now on the workers push this slice here; this is how it travels upstream."""
        self._slices[slice_.range.key, slice_.range.index] = slice_

    def leave(self, over: threading.Event) -> None:
        """Return when all workers have left and nothing is under way, or the job is `over`."""
        while not over.wait(LEAVE_SECONDS):
            with self._service.exclusive() as core:
                if core.quiescent and core.workers.all_finished:
                    break
        self._left.set()
        for link in self.links.values():
            link.link.cut()

    def lost(self, reason: str) -> None:
        """A link to a server has ended. Its worker may have finished: those of its host have not, until all left."""
        self._lost(reason)
        if not self._left.wait(LINGER_SECONDS):
            self._fail(reason)

    def _watch(self) -> None:
        while not self._left.wait(OVERDUE_SECONDS):
            if reason := self._service.overdue():
                self._fail(reason)

    def _forward(self, works: Sequence[Work]) -> None:
        """The host's sums go upstream."""
        outgoing = Outgoing()
        for work in works:
            link = self.links[self._slices[work.id].range.server]
            outgoing.add(link, self._push(work, link))
        outgoing.send(list(self.links.values()))

    def _push(self, work: Work, link: ServerLink) -> Frame:
        """The value comes back to where the sum is."""
        slice_, last = self._slices[work.id], work.pushes[-1]
        values = work.target.array
        now, asked = time.monotonic(), time.perf_counter()
        ready = asked - (now - max(push.ready for push in work.pushes))
        arrival = _Arrival(partial(self._arrived, work, now - work.began))
        link.expect(Landing(slice_, values, arrival, asked=asked), last.clock)
        return link.push(slice_, values, last.clock, last.rate, work.slice.priority, Flag.PULL, ready)

    def _arrived(self, work: Work, summing: float, trip: Trip) -> None:
        """Report seconds of adding, coding and the server's work as work; the rest is the wire."""
        self._service.done(work, trip.waited, summing + trip.handled + trip.worked)


class _Arrival(Handle):
    """Calls `then` when the value is here, on the thread that has received it."""

    def __init__(self, then: Callable[[Trip], None]) -> None:
        super().__init__(1, "a host's sum", 0.0)
        self._arrived = then

    def one_done(self, trip: Trip | None = None) -> None:
        assert trip is not None  # of a value
        self._arrived(trip)


def _refuse(connection: Link, header: Header) -> tuple[bytes, memoryview | None]:
    raise FrameError(f"frame kind {header.kind} to a relay")
