"""The relay of a host: sums the pushes of the host's workers in shared memory and sends the sum to the servers on other
hosts.

Theory of operation. The relay runs in the process of the host's first worker. To its workers it is a server (a Service
with its own ServerCore), reached through shared memory. When a round of a slice is complete, the relay adds the pushes
as a server would, and pushes the sum upstream on its own link (role "relay": that push counts for all its workers). The
value that comes back replaces the sum in shared memory, where the workers read it. Gradients are compressed once, on
their way upstream, and the residual belongs to the host.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from dmltrain.base.env import Environment
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.links.service import OVERDUE_SECONDS, Service, allocator
from dmltrain.kvstore.server.work import Work
from dmltrain.kvstore.transport.data_links import DataLinks
from dmltrain.kvstore.transport.host import Ranks
from dmltrain.kvstore.transport.message.job import LinkLost
from dmltrain.kvstore.transport.outbox import Frame
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Flag
from dmltrain.kvstore.waiting import Trip
from dmltrain.kvstore.worker.links.outgoing import Outgoing
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import Destination, WorkerSlice

LEAVE_SECONDS = 0.05  # interval for checking whether the workers have left


class Relay:
    """Serves the workers `ranks` through `listening`; `below` gets their links. `lost(link)` reports a link to a server
    that has ended, `fail(reason)` and `overdue(reason)` end the job."""

    def __init__(
        self,
        environment: Environment,
        ranks: Ranks,
        arena: Arena,
        listening: socket.socket,
        below: DataLinks,
        lost: Callable[[LinkLost], None],
        fail: Callable[[str], None],
        overdue: Callable[[str], None],
    ) -> None:
        self.links: dict[int, ServerLink] = {}  # by server, to be filled before the first push
        self._slices: dict[tuple[int, int], WorkerSlice] = {}
        self._lost, self._overdue, self._leave_seconds = lost, overdue, environment.wait_seconds
        self._left = threading.Event()
        core = ServerCore(environment.num_workers, wait_seconds=environment.wait_seconds, allocate=allocator(arena))
        core.workers.on_hosts([ranks])
        name = f"the relay of worker {ranks[0]}"
        self._service = Service(name, environment, core, arena, fail, self._forward)
        self._service.admission.expect(ranks)
        self._service.accept(listening, below)
        threading.Thread(target=self._watch, name="relay", daemon=True).start()

    def carry(self, slice_: WorkerSlice) -> None:
        """Serve this slice from now on; `slice_` describes it for the way upstream."""
        self._slices[slice_.range.key, slice_.range.index] = slice_

    def leave(self, over: threading.Event) -> None:
        """Leave when all workers have left and no round is in progress, or when the job is `over`."""
        while not over.wait(LEAVE_SECONDS):
            with self._service.shared.exclusive() as core:
                if core.quiescent and core.workers.all_finished:
                    break
        if not over.is_set():
            self._leave_servers(over)
        self._left.set()
        for link in self.links.values():
            link.link.cut()

    def _leave_servers(self, over: threading.Event) -> None:
        leaving = [link.leave(self._leave_seconds) for link in self.links.values()]
        while not (over.is_set() or all(handle.done for handle in leaving)):
            over.wait(LEAVE_SECONDS)

    def lost(self, link: LinkLost) -> None:
        """A link to a server has ended. That is a failure until all workers of this host have left, even if the relay's
        own worker has finished."""
        if not self._left.is_set():
            self._lost(link)

    def _watch(self) -> None:
        while not self._left.wait(OVERDUE_SECONDS):
            if reason := self._service.overdue():
                self._overdue(reason)

    def _forward(self, works: Sequence[Work]) -> None:
        """Send the host's sums upstream."""
        outgoing = Outgoing()
        for work in works:
            link = self.links[self._slices[work.id].range.server]
            outgoing.add(link, self._push(work, link))
        outgoing.send(list(self.links.values()))

    def _push(self, work: Work, link: ServerLink) -> Frame:
        """The PUSH frame of a sum; its value will replace the sum in memory."""
        slice_, last = self._slices[work.id], work.pushes[-1]
        values = work.target.array
        now, asked = time.monotonic(), time.perf_counter()
        ready = asked - (now - max(push.ready for push in work.pushes))
        arrival = _Arrival(partial(self._arrived, work, now - work.began))
        link.expect(Destination(slice_, values, arrival, asked=asked), last.clock)
        return link.push(slice_, values, last.clock, last.rate, work.slice.priority, Flag.PULL, ready)

    def _arrived(self, work: Work, summing: float, trip: Trip) -> None:
        """Report the seconds of summing, of coding and of the server as work. The rest of the time is the wire's."""
        self._service.arithmetic.done(work, trip.waited, summing + trip.handled + trip.worked)


class _Arrival(Handle):
    """Calls `then` when the value has arrived, on the thread that received it."""

    def __init__(self, then: Callable[[Trip], None]) -> None:
        super().__init__(1, "a host's sum", 0.0)
        self._arrived = then

    def one_done(self, trip: Trip | None = None) -> None:
        assert trip is not None  # of a value
        self._arrived(trip)
