"""Serves a core's slices to workers: does the I/O between their links and the core. Each worker has one receiving
and one sending thread; a pool of threads does the arithmetic.

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

from dmltrain.arrays import Array
from dmltrain.env import Environment
from dmltrain.kvstore.log import log
from dmltrain.kvstore.server.answers import Answers, next_of
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.lockstep import Parts
from dmltrain.kvstore.server.pool import Pool
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.slice import Allocate, Buffer, Work, private
from dmltrain.kvstore.server.workers import relay_number
from dmltrain.kvstore.transport import message, rendezvous, wire
from dmltrain.kvstore.transport.data_links import DataLinks
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message import Declare, Error, Leave
from dmltrain.kvstore.transport.outbox import LAST, Outbox
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError
from dmltrain.kvstore.transport.wire import Flag, FrameError, Header, Kind

OVERDUE_SECONDS = 1.0  # interval of straggler diagnoses
DRAIN_SECONDS = 1.0  # to send queued answers when a link ends
MAX_THREADS = 4  # for arithmetic; two or three saturate a machine's memory
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
    ) -> None:
        self._name, self._environment = name, environment
        self._core, self._arena = core, arena
        self._fail, self._other, self._forward = fail, other, forward
        self._lock = threading.Lock()  # guards _core and what _answers has sent
        self._progress = threading.Condition(self._lock)  # work is done
        self._answers = Answers(self._lock)
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = Pool(self._threads, "arithmetic")
        self._own = threading.local()  # memory of each receiving thread
        self._expected: frozenset[int] = frozenset()
        self._complete = threading.Event()  # all expected have connected
        self._silent: set[int] = set()  # workers and relays whose link has not had a frame yet
        self._left: set[int] = set()  # workers and relays

    def expect(self, workers: Collection[int], relays: Collection[int] = ()) -> None:
        """Stop listening when all these have connected: after that, unauthenticated peers cannot take this process's
        time. Call this before `accept`."""
        total = self._environment.num_workers
        self._expected = frozenset(workers) | {relay_number(total, rank) for rank in relays}

    def accept(self, listening: socket.socket, links: DataLinks | None = None) -> None:
        """Accept workers, each on its own thread. Through a unix socket they share memory. `links` gets their links."""
        admit = self._admit if listening.family == socket.AF_UNIX else None
        serve = functools.partial(self._serve, links)
        threading.Thread(
            target=accept_loop,
            name="accept",
            daemon=True,
            args=(listening, self._environment, self._name, serve, admit, self._complete),
        ).start()

    def overdue(self) -> str:
        """The straggler diagnosis; see ServerCore."""
        with self.exclusive() as core:
            return core.overdue(time.monotonic())

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[ServerCore]:
        """The core, exclusively for this thread."""
        with self._lock:
            yield self._core

    @contextlib.contextmanager
    def quiescent(self, seconds: float = QUIESCENT_SECONDS) -> Iterator[ServerCore]:
        """The core, exclusively, while no work is in progress. Raises Rejected if there is some for `seconds`."""
        with self._progress:
            if not self._progress.wait_for(lambda: self._core.quiescent, seconds):
                raise Rejected(
                    f"{self._name} was busy with optimizer steps for {seconds:g} s, and each changes "
                    "its state: save and load states between two barriers"
                )
            yield self._core

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
            log(f"{self._name}: cut off {role} {index}: not a worker of this job, or already connected")
            return connection.close()
        if links:
            links.add(connection, role, index)
        worker, outbox = entered
        error = self._receive_all(connection, outbox, worker, f"{role} {index}")
        outbox.finish(DRAIN_SECONDS)
        connection.close()
        with self._lock:
            given_up = self._forget(worker, outbox)
            if not given_up:
                self._answers.release_all(worker)
        if links and not given_up and worker not in self._left:
            links.lost(connection, error)

    def _forget(self, worker: int, outbox: Outbox) -> bool:
        """Whether the caller has given up this link before its first frame; then it connects again, or says why not.
        (Its time for the handshake may end just before ACCEPT arrives.) Call this with the lock held."""
        current = self._answers.outboxes.get(worker)
        if current is outbox and worker in self._silent:
            del self._answers.outboxes[worker]
            return True
        return current is not outbox

    def _receive_all(self, connection: Link, outbox: Outbox, worker: int, caller: str) -> Exception:
        """Serve the link to its end. Returns what has ended it."""
        try:
            headers = connection.read_headers(1)
            with self._lock:
                self._silent.discard(worker)
            self._take(connection, outbox, worker, headers[0])
            while True:
                headers = connection.read_headers(BATCH)
                outbox.wait_for_room()
                if all(header.kind == Kind.PUSH and header.flags & Flag.SHARED for header in headers):
                    with self._lock:
                        buffers = [self._lent(connection, worker, header) for header in headers]
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
        workers = self._environment.num_workers
        number = {"worker": index, "relay": relay_number(workers, index)}.get(role, -1) if index < workers else -1
        with self.exclusive() as core:
            before = self._answers.outboxes.get(number)
            given_up = before is not None and number in self._silent and before.link.has_ended
            if not core.workers.takes(number) or (before and not given_up):
                return None
            core.workers.join(number)
            outbox = self._answers.outboxes[number] = Outbox(connection, f"to {role} {index}")
            self._silent.add(number)
            complete = self._expected and self._expected <= self._answers.outboxes.keys()
        if before:
            before.link.cut()
        if complete:
            self._complete.set()
        return number, outbox

    def _take(self, connection: Link, outbox: Outbox, worker: int, header: Header) -> None:
        kind = header.kind
        if kind == Kind.PUSH:
            self._push(worker, [header], [self._receive(connection, worker, header)])
        elif kind == Kind.PULL:
            with self._lock:  # a pull never completes a round
                self._act(
                    self._core.pull(worker, header.key, header.slice, header.clock, time.monotonic(), header.priority)
                )
            self._answers.send()
        elif kind in (Kind.GROUP, Kind.PUSH_GROUP, Kind.PULL_GROUP):
            self._take_group(connection, worker, header)
        elif kind in (Kind.RELEASE, Kind.RELEASE_GROUP):
            self._answers.released(worker, header, connection.read_payload(header))
        elif kind == Kind.PROBE:
            payload = connection.read_payload(header, wire.MAX_PROBE)
            outbox.put(Header(Kind.PROBE, len(payload)).pack(), memoryview(payload), LAST)
        elif kind == Kind.DECLARE:
            declared = message.expect(connection.read_message(header), Declare)
            with self._lock:
                self._core.declare(worker, declared)
            outbox.put(Header(Kind.DONE).pack())
        elif kind == Kind.INIT:
            buffer = self._receive(connection, worker, header, initial=True)
            with self._lock:
                self._core.initialise(worker, header.key, header.slice, buffer.array)
                self._core.give_back(header.key, header.slice, buffer)
            outbox.put(Header(Kind.DONE).pack())
        elif kind == Kind.LEAVE:
            message.expect(connection.read_message(header), Leave)
            self._leave(worker)
            outbox.put(Header(Kind.DONE).pack())
        else:
            outbox.put(*self._other(connection, header))

    def _take_group(self, connection: Link, worker: int, header: Header) -> None:
        if self._forward:
            raise FrameError("a group to a relay")
        if header.kind == Kind.GROUP:
            content = wire.parse_group(connection.read_payload(header, wire.MAX_GROUP))
            with self._lock:
                self._core.groups.declare(worker, header.key, content)
        elif header.kind == Kind.PUSH_GROUP:
            self._push_group(worker, header, self._receive_group(connection, worker, header))
        else:
            with self._lock:  # a pull never completes a round
                self._act(self._core.groups.pull(worker, header.key, header.clock, time.monotonic(), header.priority))
            self._answers.send()

    def _push_group(self, worker: int, header: Header, data: Parts) -> None:
        now = time.monotonic()
        with self._lock:
            groups = self._core.groups
            actions = groups.push(worker, header.key, header.clock, header.number, data, now, header.waited)
            if header.flags & Flag.PULL:
                actions += groups.pull(worker, header.key, header.clock, now, header.priority)
            works = deque(self._act(actions))
        self._begin(works, at_once=data.kind == "completing")

    def _receive_group(self, connection: Link, worker: int, header: Header) -> Parts:
        if header.flags & Flag.OFFSETS:
            offsets = bytes(connection.read_payload(header, wire.MAX_OFFSETS))
            view = functools.partial(_memory, connection)
            with self._lock:
                return self._core.groups.lend(worker, header.key, offsets, view)
        with self._lock:
            buffer = self._core.groups.buffer(worker, header.key, header.length, header.clock, self._thread_memory)
        connection.read_parts(buffer.views())
        return buffer

    def _leave(self, worker: int) -> None:
        """The worker, or relay, has sent its last push. A link that ends without that is lost: its worker has not
        finished, and others still wait for it until the job ends."""
        with self._lock:
            self._left.add(worker)
            self._act(self._core.finish(worker, time.monotonic()))
        self._answers.send()

    def _push(self, worker: int, headers: list[Header], buffers: list[Buffer]) -> None:
        now, works, full = time.monotonic(), deque[Work](), list[tuple[int, int]]()
        with self._lock:
            for header, buffer in zip(headers, buffers, strict=True):
                actions = self._core.push(
                    worker, header.key, header.slice, header.clock, header.number, buffer, now, header.waited
                )
                if header.flags & Flag.PULL:
                    actions += self._core.pull(worker, header.key, header.slice, header.clock, now, header.priority)
                works += self._act(actions)
                if self._core.backlog(header.key, header.slice) > MAX_BACKLOG:
                    full.append((header.key, header.slice))
        self._begin(works, at_once=buffers[0].kind == "completing")
        for key, index in full:  # limits the memory of pushes when steps are slower than pushes
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

    def _receive(self, connection: Link, worker: int, header: Header, initial: bool = False) -> Buffer:
        with self._lock:
            if header.flags & Flag.SHARED:
                return self._lent(connection, worker, header)
            push = (worker, header.key, header.slice, header.length, header.dtype)
            buffer = None if initial else self._core.completing_buffer(*push, header.clock, self._thread_memory)
            buffer = buffer or self._core.buffer(*push, initial)
        if header.length:
            connection.read_into(memoryview(buffer.array).cast("B"))  # type: ignore[arg-type]
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
        found = []
        with self._progress:
            for work in works:
                found += self._act(self._core.done(work, time.monotonic(), waited, worked))
            self._progress.notify_all()
        self._answers.send()
        return found


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
