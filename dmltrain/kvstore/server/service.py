"""Serves a core's slices to workers: does the I/O between their links and the core. Each worker has one receiving
and one sending thread; a pool of threads does the arithmetic.

Views. Each frame of an elastic job has the number of the view in which it was made (view.py). `enter` begins another
view. From then on frames of older views change nothing and get no answer, except RELEASE, PROBE and LEAVE, which
concern their own link only. A frame is carried out under the same lock under which its view was compared: so no view
can begin in between.

Replacements. The link of a replacement waits for a view that has this worker; then it becomes the link of this rank.
The lost process may only be frozen, and go on later. It can do no harm: its link was cut, its frames are of older
views, and the values that it read are released already.

A worker on this host connects through a unix socket (rendezvous.py). Server and worker then read pushes and values in
shared memory, and only headers go through the socket.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.kvstore.kind import kind_of
from dmltrain.kvstore.log import log
from dmltrain.kvstore.server.answers import Answers, next_of
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.memory import Allocate, Buffer, private
from dmltrain.kvstore.server.pool import Pool
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.slice import Work
from dmltrain.kvstore.server.workers import relay_number
from dmltrain.kvstore.transport import flat, message, rendezvous, wire
from dmltrain.kvstore.transport.data_links import DataLinks
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message import Declare, Error, Hold, Leave, Left
from dmltrain.kvstore.transport.outbox import LAST, Outbox
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header
from dmltrain.kvstore.view import View

REPLACE_SECONDS = 10.0  # for the view without the worker whose place a caller takes
OVERDUE_SECONDS = 1.0  # interval of straggler diagnoses
DRAIN_SECONDS = 1.0  # to send queued answers when a link ends
MAX_THREADS = 4  # for arithmetic; two or three saturate a machine's memory
# Kinds of frames that concern their own link only, so they count in every view.
OF_ANY_VIEW = frozenset(map(int, (FrameKind.RELEASE, FrameKind.PROBE, FrameKind.LEAVE)))
MAX_BACKLOG = 8  # pushes of a slice that wait for their step
QUIESCENT_SECONDS = 10.0  # time limit for work to end before a state is read
BATCH = 16  # maximum of headers read together: with more, the first sums would begin later
INLINE_BYTES = 1 << 16  # work on slices up to this size costs less than handing it to another thread

Other = Callable[[Link, Header], tuple[bytes, memoryview | None]]
Forward = Callable[[Sequence[Work]], None]


class Service:
    """`fail(reason)` ends the job when work has failed. `other(link, header)` handles frames that concern all slices:
    it returns the answer (header, payload), or raises Rejected or FrameError. `forward(works)`, if given, gets work
    that has run, and must call `done` later."""

    def __init__(
        self,
        name: str,
        environment: Environment,
        core: ServerCore,
        arena: Arena | None,
        fail: Callable[[str], None],
        other: Other,
        forward: Forward | None = None,
        left: Callable[[Left], None] = lambda message: None,
    ) -> None:
        self._name, self._environment = name, environment
        self._core, self._arena = core, arena
        self._fail, self._other, self._forward, self._tell_left = fail, other, forward, left
        self._lock = threading.Lock()  # guards _core and what _answers has sent
        self._progress = threading.Condition(self._lock)  # work is done, or another view or the end has come
        self._changed = threading.Condition(self._lock)  # another view or the end has come, or a link has ended
        self._view = 0  # its number
        self._servers = tuple(range(environment.num_servers))  # of this view; before the first those of the start
        self._over = False
        self._answers = Answers(self._lock)
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = Pool(self._threads, "arithmetic")
        self._own = threading.local()  # memory of each receiving thread
        self._expected: frozenset[int] = frozenset()
        self._complete = threading.Event()  # all expected have connected
        self._silent: set[Outbox] = set()  # of links that have not had a frame yet
        self._left: set[Outbox] = set()  # of workers and relays that have left
        self._finished: dict[int, int] = {}  # workers that have left -> the last op that each held

    def start(self, hosts: Sequence[tuple[int, ...]]) -> None:
        """Set the ranks on each host at the job's start. Without effect if a view has begun already, which may happen
        because views come on the control link's thread: then the view says which workers there are."""
        with self._lock:
            if not self._view:
                self._core.on_hosts(hosts)

    def expect(self, workers: Collection[int], relays: Collection[int] = ()) -> None:
        """Stop listening when all these have connected, so that unauthenticated peers can no longer take this process's
        time. A server of an elastic job goes on, slowly, because replacements may come. Call this before `accept`."""
        total = self._environment.ranks
        self._expected = frozenset(workers) | {relay_number(total, rank) for rank in relays}

    def accept(self, listening: socket.socket, links: DataLinks | None = None) -> None:
        """Accept workers, each on its own thread. Through a unix socket they share memory. `links` gets their links."""
        admit = self._admit if listening.family == socket.AF_UNIX else None
        serve, stays = functools.partial(self._serve, links), bool(self._environment.elastic)
        threading.Thread(
            target=accept_loop,
            name="accept",
            daemon=True,
            args=(listening, self._environment, self._name, serve, admit, self._complete, stays),
        ).start()

    def overdue(self) -> str:
        """The straggler diagnosis; see ServerCore."""
        with self.exclusive() as core:
            return core.overdue(time.monotonic())

    def enter(self, view: View) -> None:
        """Begin this view, once no work is in progress. Ignored if it is older than the present one."""
        works = deque[Work]()
        with self._paused(works):
            self._progress.wait_for(lambda: self._core.quiescent or self._over)
            if view.number > self._view and not self._over:
                self._begin_view(view)
        self._go_on(works)

    def _begin_view(self, view: View) -> None:
        """Call this with the lock held, while the core is quiescent."""
        lost, joined = {worker.member for worker in view.lost}, set(view.members).difference(self._core.workers.ranks)
        others = self._servers != view.servers or bool(view.joined_servers)
        self._core.enter(view.hosts, lost, others)
        if kind := kind_of(view):
            self._core.become(kind)
        self._servers = view.servers
        replaced = joined & self._answers.joining.keys()  # a replay's workers return by the links that they have
        self._answers.enter(view.number, view.members, lost | replaced)
        left = {worker.member for worker in view.left}
        for member in lost | left | joined:  # it was removed, has not come to its end, or this is its replacement
            self._finished.pop(member, None)
        self._view = view.number
        self._progress.notify_all()
        self._changed.notify_all()

    @property
    def view(self) -> int:
        """The number of the present one; it changes only while nobody has the core exclusively."""
        return self._view

    def finished(self) -> dict[int, int]:
        """The workers that have left -> the last op that each held."""
        with self._lock:
            return dict(self._finished)

    def end(self) -> None:
        """The job is over: wake all threads that wait for something."""
        with self._progress:
            self._over = True
            self._progress.notify_all()
            self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[ServerCore]:
        """The core, exclusively for this thread."""
        with self._lock:
            yield self._core

    @contextlib.contextmanager
    def quiescent(self, seconds: float = QUIESCENT_SECONDS) -> Iterator[ServerCore]:
        """The core, exclusively, while no work is in progress. Raises Rejected if there is some for `seconds`."""
        works = deque[Work]()
        try:
            with self._paused(works):
                if not self._progress.wait_for(lambda: self._core.quiescent, seconds):
                    raise Rejected(
                        f"{self._name} was busy with optimizer steps for {seconds:g} s, and each changes "
                        "its state: save and load states between two barriers"
                    )
                yield self._core
        finally:
            self._go_on(works)

    @contextlib.contextmanager
    def _paused(self, works: deque[Work]) -> Iterator[None]:
        """A context that holds the lock. If the core can pause, no new work begins meanwhile. Afterwards `works` has
        the work that became possible."""
        with self._progress:
            is_paused = self._core.pause()
            try:
                yield
            finally:
                if is_paused:
                    works += self._act(self._core.resume(time.monotonic()))

    def _go_on(self, works: deque[Work]) -> None:
        if works:
            self._answers.send()
            self._pool.submit(functools.partial(self._carry_out, works))

    def done(self, work: Work, waited: float, worked: float) -> None:
        """Forwarded work is complete; for the times see ServerCore.done."""
        works = deque(self._done([work], waited, worked))
        if works:
            self._pool.submit(functools.partial(self._carry_out, works))

    def _admit(self, connection: Link) -> None:
        """Accept a caller through the unix socket: exchange shared memory."""
        assert self._arena is not None  # the unix socket exists only with an arena
        try:
            rendezvous.exchange(connection, self._arena)
        except ArenaError as error:
            raise FrameError(str(error)) from error

    def _serve(self, links: DataLinks | None, connection: Link, role: str, index: int) -> None:
        entered = self._enter(connection, role, index)
        if entered is None:
            return self._refuse(connection, f"cut off {role} {index}: not a worker of this job, or already connected")
        if links:
            links.add(connection, role, index)
        worker, outbox = entered
        error = self._receive_all(connection, outbox, worker, f"{role} {index}")
        outbox.finish(DRAIN_SECONDS)
        connection.close()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._answers.joining.get(worker) is not outbox)
            forgotten = self._forget(worker, outbox)
            if not forgotten:
                self._answers.release_all(worker)
        if not links:
            return
        if forgotten or outbox in self._left:
            links.forget(connection)
        else:
            links.lost(connection, error)

    def _refuse(self, connection: Link, reason: str) -> None:
        log(f"{self._name}: {reason}")
        if self._environment.elastic:
            with contextlib.suppress(Closed):
                connection.send(message.encode(Error(f"{self._name}: {reason}")))
        connection.close()

    def _forget(self, worker: int, outbox: Outbox) -> bool:
        """Whether the end of this link is no loss: its worker was removed, or the caller gave it up before its first
        frame. (That happens if the caller's time for the handshake ends just before ACCEPT arrives. The caller then
        connects again, or reports why it cannot.) Call this with the lock held."""
        current, silent = self._answers.outboxes.get(worker), outbox in self._silent
        self._silent.discard(outbox)
        if current is outbox and silent and not self._view:
            del self._answers.outboxes[worker]
            return True
        return current is not outbox

    def _receive_all(self, connection: Link, outbox: Outbox, worker: int, caller: str) -> Exception:
        """Serve the link to its end. Returns what has ended it."""
        try:
            headers = connection.read_headers(1)
            with self._lock:
                self._silent.discard(outbox)
            self._take(connection, outbox, worker, headers[0])
            while True:
                headers = connection.read_headers(BATCH)
                outbox.wait_for_room()
                if all(header.kind == FrameKind.PUSH and header.flags & Flag.SHARED for header in headers):
                    self._wait_for(max([header.view for header in headers]))
                    self._check_member(worker, headers[-1].view)
                    with self._lock:
                        headers = [header for header in headers if header.view == self._view]
                        buffers = [self._lent(connection, worker, header) for header in headers]
                    if headers:
                        self._push(worker, headers, buffers)
                else:
                    for header in headers:
                        self._take(connection, outbox, worker, header)
                        outbox.wait_for_room()
        except Closed as error:
            return error
        except (Rejected, FrameError) as error:
            log(f"{self._name}: {caller}: {error}")
            outbox.put(message.encode(Error(str(error))))
            return error
        except Exception as error:  # a bug in this program: end the job immediately, with the reason
            traceback.print_exc()
            outbox.put(message.encode(Error(f"{self._name}: {type(error).__name__}: {error}")))
            return error

    def _enter(self, connection: Link, role: str, index: int) -> tuple[int, Outbox] | None:
        """Admit a worker or relay: returns its number and the queue to it, or None if it may not connect."""
        workers = self._environment.ranks
        number = {"worker": index, "relay": relay_number(workers, index)}.get(role, -1) if index < workers else -1
        with self._changed:
            if self._view and 0 <= number < workers:  # the scheduler has let it join: its view may come a little later
                self._changed.wait_for(lambda: self._over or self._place(number) is not None, REPLACE_SECONDS)
            place = self._place(number)
            if place is None:
                return None
            if place is self._answers.outboxes:
                self._core.workers.join(number)
            before, outbox = place.get(number), Outbox(connection, f"to {role} {index}")
            place[number] = outbox
            self._silent.add(outbox)
            complete = self._expected and self._expected <= self._answers.outboxes.keys()
            self._changed.notify_all()
        if before:
            before.link.cut()
        if complete:
            self._complete.set()
        return number, outbox

    def _place(self, number: int) -> dict[int, Outbox] | None:
        """The dictionary for a new link of this worker or relay: that of the links in use, or that of the links that
        wait for a view with their worker. None if it may not connect. Call this with the lock held."""
        answers, known = self._answers, self._core.workers.takes(number)
        before = answers.outboxes.get(number)
        if known and before is None:
            return answers.outboxes
        joins_later = self._environment.num_workers <= number < self._environment.ranks
        if not self._view and not joins_later:
            given_up = before is not None and before in self._silent and before.link.has_ended
            return answers.outboxes if known and given_up else None
        free = before is None or before.link.has_ended
        return answers.joining if free and 0 <= number < self._environment.ranks else None

    def _take(self, connection: Link, outbox: Outbox, worker: int, header: Header) -> None:
        if header.kind in OF_ANY_VIEW:
            return self._take_of_any_view(connection, outbox, worker, header)
        self._wait_for(header.view)
        self._check_member(worker, header.view)
        kind, done = header.kind, False
        if kind == FrameKind.PUSH:
            if buffer := self._receive(connection, worker, header):
                self._push(worker, [header], [buffer])
        elif kind == FrameKind.PULL:
            with self._lock:  # a pull never completes a round
                if header.view == self._view:
                    where = header.key, header.slice
                    self._act(self._core.pull(worker, *where, header.clock, time.monotonic(), header.priority))
            self._answers.send()
        elif kind == FrameKind.FLAT:
            self._take_flat(connection, worker, header)
        elif kind == FrameKind.DECLARE:
            declared = message.expect(connection.read_message(header), Declare)
            with self._lock:
                if done := header.view == self._view:
                    self._core.declare(worker, declared)
        elif kind == FrameKind.HOLD:
            held = message.expect(connection.read_message(header), Hold)
            done = self._hold(worker, held.step, header.view)
        elif kind == FrameKind.INIT:
            done = self._initialise(connection, worker, header)
        elif header.view < self._view:
            connection.discard(header)
        else:
            outbox.put(*self._other(connection, header))
        if done:
            outbox.put(Header(FrameKind.DONE, 0, header.view).pack())

    def _take_of_any_view(self, connection: Link, outbox: Outbox, worker: int, header: Header) -> None:
        if header.kind == FrameKind.PROBE:
            payload = connection.read_payload(header, wire.MAX_PROBE)
            outbox.put(Header(FrameKind.PROBE, len(payload), header.view).pack(), memoryview(payload), LAST)
        elif header.kind == FrameKind.LEAVE:
            # The record of a worker that has finished must name its last view: another scheduler needs it (resume.py).
            self._wait_for(header.view)
            self._leave(worker, outbox, message.expect(connection.read_message(header), Leave).done)
            outbox.put(Header(FrameKind.DONE, 0, header.view).pack())
        else:
            self._answers.released(worker, outbox, connection.read_payload(header))

    def _initialise(self, connection: Link, worker: int, header: Header) -> bool:
        """Take an initial value; returns whether it was of the present view."""
        buffer = self._receive(connection, worker, header, initial=True)
        if buffer is None:
            return False
        with self._lock:
            of_this_view = header.view == self._view
            if of_this_view:
                self._core.initialise(worker, header.key, header.slice, buffer.array)
            self._core.give_back(buffer)
        return of_this_view

    def _wait_for(self, view: int) -> None:
        """Wait until this server has entered the view, which a worker has already. Raises Closed at the job's end."""
        if view <= self._view:
            return
        if not self._environment.elastic:
            raise FrameError(f"a frame of view {view} in a job that is not elastic")
        with self._progress:
            self._progress.wait_for(lambda: view <= self._view or self._over)
        if view > self._view:
            raise Closed(f"the job has ended before view {view}")

    def _check_member(self, worker: int, view: int) -> None:
        """Raises Closed if the present view is without this worker although the worker has entered a view of the same
        number. A lost scheduler may have announced that one, and the next scheduler another one."""
        if view and view == self._view and not self._core.workers.takes(worker):
            raise Closed(f"view {view} is without this worker")

    def _take_flat(self, connection: Link, worker: int, header: Header) -> None:
        if self._forward or self._environment.elastic:
            raise FrameError(f"a flat key {'to a relay' if self._forward else 'in an elastic job'}")
        keys = flat.parse(connection.read_payload(header, flat.MAX_BYTES))
        with self._lock:
            self._core.flats.declare(worker, header.key, keys)

    def _leave(self, worker: int, outbox: Outbox, held: int) -> None:
        """The worker, or relay, has sent its last push. A link that ends without LEAVE is lost: its worker has not
        finished, and others wait for it until the job ends."""
        report = None
        with self._lock:
            self._left.add(outbox)
            if self._answers.outboxes.get(worker) is outbox:
                if self._core.workers.takes(worker):  # else this view is without it: it has left on purpose
                    self._finished[worker] = held
                    report = Left(self._view, worker, held)
                self._act(self._core.finish(worker, time.monotonic()))
        if report:  # before the worker may end
            self._tell_left(report)
        self._answers.send()

    def _hold(self, worker: int, step: int, view: int) -> bool:
        """See ServerCore.hold. Returns whether it is of the present view. Raises Rejected."""
        with self.exclusive() if self._core.steps_at_once else self.quiescent() as core:
            is_present = view == self._view and core.workers.takes(worker)
            if is_present:
                self._act(core.hold(worker, step, time.monotonic()))
        self._answers.send()
        return is_present

    def _push(self, worker: int, headers: list[Header], buffers: list[Buffer]) -> None:
        now, works, full = time.monotonic(), deque[Work](), list[tuple[int, int]]()
        with self._lock:
            for header, buffer in zip(headers, buffers, strict=True):
                if header.view < self._view:
                    self._core.give_back(buffer)
                    continue
                actions = self._core.push(
                    worker, header.key, header.slice, header.clock, header.number, buffer, now, header.waited
                )
                if header.flags & Flag.PULL:
                    actions += self._core.pull(worker, header.key, header.slice, header.clock, now, header.priority)
                works += self._act(actions)
                if self._core.backlog(header.key, header.slice) > MAX_BACKLOG:
                    full.append((header.key, header.slice))
        self._begin(works, at_once=buffers[0].kind == "completing")
        for key, index in full:  # if steps are slower than pushes, this limits the memory for pushes that wait
            self._let_step(key, index)

    def _begin(self, works: deque[Work], at_once: bool) -> None:
        """Send what a push has answered, and run the work that follows from it, `at_once` on this thread."""
        self._answers.send()
        if at_once:
            self._carry_out(works)
        else:
            self._hand_out(works)

    def _let_step(self, key: int, index: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._core.backlog(key, index) <= MAX_BACKLOG, QUIESCENT_SECONDS)

    def _hand_out(self, works: deque[Work]) -> None:
        """Run work on the pool if that is faster. (Data that this thread has received is still in its core's cache.)"""
        shared = sum(work.lent_bytes for work in works)
        if shared > INLINE_BYTES:
            for _ in range(min(len(works), self._threads)):
                self._pool.submit(functools.partial(self._carry_out, works))
        else:
            self._carry_out(works)

    def _receive(self, connection: Link, worker: int, header: Header, initial: bool = False) -> Buffer | None:
        """The payload of a push, or of an initial value; None if it is of an older view."""
        with self._lock:
            if header.view < self._view:
                buffer = None
            elif header.flags & Flag.SHARED:
                return self._lent(connection, worker, header)
            else:
                push = (worker, header.key, header.slice, header.length, header.dtype)
                buffer = None if initial else self._core.completing_buffer(*push, header.clock, self._thread_memory)
                buffer = buffer or self._core.buffer(*push, initial)
        if buffer is None:
            connection.discard(header)
        elif header.length:
            try:
                connection.read_into(memoryview(buffer.array).cast("B"))  # type: ignore[arg-type]
            except (Closed, FrameError):
                with self._lock:
                    self._core.give_back(buffer)
                raise
        return buffer

    def _thread_memory(self, size: int) -> Array:
        """This thread's buffer, reused so that it stays in its core's cache."""
        own: dict[str, Array] = self._own.__dict__
        if "memory" not in own or own["memory"].size < size:
            own["memory"] = np.empty(size, np.uint8)
        return own["memory"][:size]

    def _lent(self, connection: Link, worker: int, header: Header) -> Buffer:
        """A push in the worker's shared memory. Call this with the lock held."""
        data = _memory(connection, header.offset, header.length)
        return self._core.lend(worker, header.key, header.slice, data, header.dtype)

    def _act(self, actions: list[Action]) -> list[Work]:
        """Queue the replies; returns the work for `_hand_out`. Call this with the lock held."""
        works = []
        for action in actions:
            if isinstance(action, Work):
                works.append(action)
            else:
                self._answers.queue(action)
        return works

    def _carry_out(self, works: deque[Work]) -> None:
        """Run work and what follows from it. Several threads may share one `works`."""
        try:
            while some := _some(works):
                for work in some:
                    work.run()
                if self._forward:
                    self._forward(some)
                else:
                    works += self._done(some)
        except Exception as error:  # an optimizer's error, or a bug: end the job immediately, with the reason
            if not isinstance(error, Rejected):
                traceback.print_exc()
            self._fail(f"{self._name}: {error}")

    def _done(self, works: Sequence[Work], waited: float = 0.0, worked: float | None = None) -> list[Work]:
        """Report work that has run; returns the work that is now possible."""
        next_works = []
        with self._progress:
            for work in works:
                next_works += self._act(self._core.done(work, time.monotonic(), waited, worked))
            self._progress.notify_all()
        self._answers.send()
        return next_works


def _some(works: deque[Work]) -> list[Work]:
    """The next work, or several small ones."""
    some: list[Work] = []
    size = 0
    while size < INLINE_BYTES and (work := next_of(works)) is not None:
        some.append(work)
        size += work.target.nbytes
    return some


def _memory(connection: Link, offset: int, size: int) -> Array:
    """A push in the memory that the peer shares. Raises FrameError."""
    if connection.peer_arena is None:
        raise FrameError("a payload in shared memory, but this link shares none")
    try:
        return connection.peer_arena.view(offset, size)
    except ValueError as error:
        raise FrameError(str(error)) from error


def allocator(arena: Arena | None) -> Allocate:
    """A function that allocates memory for values: shared if available, else private."""
    return lambda size: (arena.take(size) if arena else None) or private(size)
