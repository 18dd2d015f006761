"""Serves a core's slices to workers: does the I/O between their links and the core. Each worker has one receiving
(worker_link.py) and one sending thread; a pool of threads does the arithmetic (arithmetic.py).

Views. Each frame of an elastic job has the number of the view in which it was made (view.py). `enter` begins another
view. From then on frames of older views change nothing and get no answer, except those that concern their own link only
(`Handler.of_any_view`). A frame is carried out under the same lock under which its view was compared: so no view can
begin in between.

A worker on this host connects through a unix socket (rendezvous.py). Server and worker then read pushes and values in
shared memory, and only headers go through the socket.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dmltrain.base.env import Environment
from dmltrain.kvstore.kind import kind_of
from dmltrain.kvstore.log import log
from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.links.admission import Admission
from dmltrain.kvstore.server.links.answers import Answers
from dmltrain.kvstore.server.links.arithmetic import Arithmetic, Forward
from dmltrain.kvstore.server.links.shared_core import SharedCore
from dmltrain.kvstore.server.links.worker_link import WorkerLink
from dmltrain.kvstore.server.memory import Allocate, private
from dmltrain.kvstore.transport import message, rendezvous
from dmltrain.kvstore.transport.data_links import DataLinks
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message.data import Error
from dmltrain.kvstore.transport.message.views import Left
from dmltrain.kvstore.transport.outbox import Outbox
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError
from dmltrain.kvstore.transport.wire import FrameError
from dmltrain.kvstore.view import View

OVERDUE_SECONDS = 1.0  # interval of straggler diagnoses
DRAIN_SECONDS = 1.0  # to send queued answers when a link ends


class States(Protocol):
    """A server's weights and optimizer state as bytes, for checkpoints."""

    def pack_state(self) -> bytes: ...

    def state_limit(self) -> int:
        """The maximum size in bytes of a state for this server."""

    def unpack_state(self, data: bytearray, view: int) -> None:
        """Restore what `pack_state` returned, unless another view than `view` has begun. Raises Rejected."""


class Service:
    """`fail(reason)` ends the job when work has failed. `forward(works)`, if given, gets work that has run, and must
    call `done` of the arithmetic later: this is a relay. `left` is told who has left. `states`: if they are not the
    core's."""

    def __init__(
        self,
        name: str,
        environment: Environment,
        core: ServerCore,
        arena: Arena | None,
        fail: Callable[[str], None],
        forward: Forward | None = None,
        left: Callable[[Left], None] = lambda message: None,
        states: States | None = None,
    ) -> None:
        self.name, self._environment, self._arena, self._tell_left = name, environment, arena, left
        self.is_relay, self.is_elastic = forward is not None, bool(environment.elastic)
        self.shared = SharedCore(core, self.is_elastic)
        self.answers = Answers(self.shared.lock)
        self.arithmetic = Arithmetic(name, self.shared, self.answers, fail, forward)
        self.admission = Admission(environment, self.shared, self.answers)
        self.states = states or _CoreStates(self.shared, self.arithmetic)
        self._servers = tuple(range(environment.num_servers))  # of this view; before the first those of the start
        self._left: set[Outbox] = set()  # of workers and relays that have left
        self._finished: dict[int, int] = {}  # workers that have left -> the last op that each held

    def start(self, hosts: Sequence[tuple[int, ...]]) -> None:
        """Set the ranks on each host at the job's start. Without effect if a view has begun already, which may happen
        because views come on the control link's thread: then the view says which workers there are."""
        with self.shared.exclusive() as core:
            if not self.shared.view:
                core.workers.on_hosts(hosts)

    def accept(self, listening: socket.socket, links: DataLinks | None = None) -> None:
        """Accept workers, each on its own thread. Through a unix socket they share memory. `links` gets their links."""
        admit = self._exchange_memory if listening.family == socket.AF_UNIX else None
        serve, complete = functools.partial(self._serve, links), self.admission.complete
        threading.Thread(
            target=accept_loop,
            name="accept",
            daemon=True,
            args=(listening, self._environment, self.name, serve, admit, complete, self.is_elastic),
        ).start()

    def overdue(self) -> str:
        """The straggler diagnosis; see ServerCore."""
        with self.shared.exclusive() as core:
            return core.overdue(time.monotonic())

    # -- views ----------------------------------------------------------------------------------------------------

    def enter(self, view: View) -> None:
        """Begin this view, once no work is in progress. Ignored if it is older than the present one."""
        shared = self.shared
        with self.arithmetic.paused():
            shared.progress.wait_for(lambda: shared.core.quiescent or shared.over)
            if view.number > shared.view and not shared.over:
                self._begin_view(view)

    def _begin_view(self, view: View) -> None:
        """Call this with the lock held, while the core is quiescent."""
        core = self.shared.core
        lost, joined = {worker.member for worker in view.lost}, set(view.members).difference(core.workers.ranks)
        others = self._servers != view.servers or bool(view.joined_servers)
        core.views.enter(view.hosts, lost, others)
        if kind := kind_of(view):
            core.views.become(kind)
        self._servers = view.servers
        replaced = joined & self.answers.joining.keys()  # a replay's workers return by the links that they have
        self.answers.enter(view.number, view.members, lost | replaced)
        left = {worker.member for worker in view.left}
        for member in lost | left | joined:  # it was removed, has not come to its end, or this is its replacement
            self._finished.pop(member, None)
        self.shared.enter(view.number)

    # -- workers that leave ---------------------------------------------------------------------------------------

    def leave(self, worker: int, outbox: Outbox, held: int) -> None:
        """The worker, or relay, has sent its last push. A link that ends without LEAVE is lost: its worker has not
        finished, and others wait for it until the job ends."""
        report = None
        with self.shared.exclusive() as core:
            self._left.add(outbox)
            if self.answers.outboxes.get(worker) is outbox:
                if core.workers.takes(worker):  # else this view is without it: it has left on purpose
                    self._finished[worker] = held
                    report = Left(self.shared.view, worker, held)
                self.arithmetic.act(core.finish(worker, time.monotonic()))
        if report:  # before the worker may end
            self._tell_left(report)
        self.answers.send()

    def finished(self) -> dict[int, int]:
        """The workers that have left -> the last op that each held."""
        with self.shared.lock:
            return dict(self._finished)

    # -- links ----------------------------------------------------------------------------------------------------

    def _exchange_memory(self, connection: Link) -> None:
        """Accept a caller through the unix socket."""
        assert self._arena is not None  # the unix socket exists only with an arena
        try:
            rendezvous.exchange(connection, self._arena)
        except ArenaError as error:
            raise FrameError(str(error)) from error

    def _serve(self, links: DataLinks | None, connection: Link, role: str, index: int) -> None:
        admitted = self.admission.admit(connection, role, index)
        if admitted is None:
            return self._refuse(connection, f"cut off {role} {index}: not a worker of this job, or already connected")
        if links:
            links.add(connection, role, index)
        number, outbox = admitted
        error = WorkerLink(self, connection, outbox, role, number).serve(f"{role} {index}")
        outbox.finish(DRAIN_SECONDS)
        connection.close()
        is_no_loss = self.admission.ended(number, outbox)
        if not links:
            return
        if is_no_loss or outbox in self._left:
            links.forget(connection)
        else:
            links.lost(connection, error)

    def _refuse(self, connection: Link, reason: str) -> None:
        log(f"{self.name}: {reason}")
        if self.is_elastic:
            with contextlib.suppress(Closed):
                connection.send(message.encode(Error(f"{self.name}: {reason}")))
        connection.close()


class _CoreStates:
    """The states of a core's slices."""

    def __init__(self, shared: SharedCore, arithmetic: Arithmetic) -> None:
        self._shared, self._arithmetic = shared, arithmetic

    def pack_state(self) -> bytes:
        with self._arithmetic.quiescent() as core:
            return optimizer_state.pack(core.slices())

    def state_limit(self) -> int:
        with self._shared.exclusive() as core:
            return optimizer_state.limit(core.slices())

    def unpack_state(self, data: bytearray, view: int) -> None:
        with self._arithmetic.quiescent() as core:
            if view == self._shared.view:
                optimizer_state.unpack(data, core.slices())


def allocator(arena: Arena | None) -> Allocate:
    """A function that allocates memory for values: shared if available, else private."""
    return lambda size: (arena.take(size) if arena else None) or private(size)
