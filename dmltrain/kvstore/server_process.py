"""A server's process: moves bytes between workers and ServerCore; one reading and one sending thread a worker, and a
pool of threads for the arithmetic.

A worker on this host comes in through a unix socket (meeting.py): its pushes are read, and its values written, in
memory that both share, and only headers go through the socket.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dmltrain.env import Environment
from dmltrain.errors import UserError
from dmltrain.kvstore import link, meeting, optimizer_state, wire
from dmltrain.kvstore.arena import Arena, ArenaError
from dmltrain.kvstore.control import EXIT_SECONDS, Control
from dmltrain.kvstore.link import Closed, Link, Outbox
from dmltrain.kvstore.scheduler_process import accept_loop, log
from dmltrain.kvstore.server import Action, Rejected, Reply, ServerCore
from dmltrain.kvstore.server_slice import Buffer, Work, private
from dmltrain.kvstore.wire import Flag, FrameError, Header, Kind

OVERDUE_SECONDS = 1.0  # between two looks at who keeps others waiting
DRAIN_SECONDS = 1.0  # for answers still queued when a link ends
MAX_THREADS = 4  # of arithmetic; more than two or three do not get more out of a machine's memory
MAX_BACKLOG = 8  # pushes of a slice that wait for their step
REST_SECONDS = 10.0  # for work to end before a state is read
AT_ONCE_BYTES = 1 << 16  # work on slices up to this size costs less than handing it to another thread


class ServerProcess:
    """Serves one job's slices. `run` returns the reason why the job was lost, empty when it went well."""

    def __init__(self, environment: Environment, exit_seconds: float = EXIT_SECONDS) -> None:
        self._environment = environment
        self._arena, self._meeting = _share(environment.transport)
        self._core = ServerCore(environment.num_workers, make_step=make_step, wait_seconds=environment.wait_seconds,
                                allocate=self._allocate)
        self._lock = threading.Lock()  # guards _core and _held
        self._progress = threading.Condition(self._lock)  # work is done
        self._held: dict[tuple[int, int, int, int], list[Reply]] = {}  # worker, key, slice, place -> being read there
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "arithmetic")
        self._outboxes: dict[int, Outbox] = {}
        self._listening = _listen(environment.node_host)
        self._name = f"server {environment.index}"
        self._ended = threading.Event()
        self._control = Control(environment, self._listening.getsockname()[1], on_end=lambda reason: self._ended.set(),
                                exit_seconds=exit_seconds, meeting=self._meeting[1] if self._meeting else "")

    def run(self) -> str:
        self._accept(self._listening)
        if self._meeting:
            self._accept(self._meeting[0], self._admit)
        while not self._ended.wait(OVERDUE_SECONDS):
            with self._lock:
                reason = self._core.overdue(time.monotonic())
            if reason:
                self._control.abort(reason)
        self._control.close()
        return self._control.failure

    def _accept(self, listening: socket.socket, admit: Any = None) -> None:
        threading.Thread(target=accept_loop, name="accept", daemon=True,
                         args=(listening, self._environment, self._name, self._serve, admit)).start()

    def _admit(self, connection: Link) -> None:
        """A caller through the unix socket: exchange memory."""
        assert self._arena is not None  # nobody listens there without one
        if not meeting.same_user(connection.sock):
            raise FrameError("another user's process on this host")
        try:
            meeting.exchange(connection, self._arena)
        except ArenaError as error:
            raise FrameError(str(error)) from error

    def _allocate(self, size: int) -> Any:
        """Memory for values: shared, while there is some."""
        return (self._arena.take(size) if self._arena else None) or private(size)

    def _serve(self, connection: Link, role: str, worker: int) -> None:
        if role != "worker" or worker >= self._environment.num_workers or worker in self._outboxes:
            log(f"{self._name}: cut off {role} {worker}: not a worker of this job, or here already")
            return connection.close()
        outbox = self._outboxes[worker] = Outbox(connection, f"to worker {worker}")
        try:
            while True:
                self._take(connection, outbox, worker, connection.read_header())
        except Closed:
            pass  # the scheduler knows whether that is the end or a loss
        except (Rejected, FrameError) as error:
            log(f"{self._name}: worker {worker}: {error}")
            outbox.put(wire.control(Kind.ERROR, {"reason": str(error)}))
        except Exception as error:  # a defect of this program: the job must end at once, and say so
            traceback.print_exc()
            outbox.put(wire.control(Kind.ERROR, {"reason": f"{self._name}: {type(error).__name__}: {error}"}))
        outbox.finish(DRAIN_SECONDS)
        connection.close()
        with self._lock:
            self._act(self._core.finish(worker))
            self._release_all(worker)

    def _take(self, connection: Link, outbox: Outbox, worker: int, header: Header) -> None:
        kind = header.kind
        if kind == Kind.PUSH:
            self._push(connection, worker, header)
        elif kind == Kind.PULL:
            with self._lock:  # a pull is never the last thing that a round waits for
                self._act(self._core.pull(worker, header.key, header.slice, header.round, time.monotonic(),
                                          header.priority))
        elif kind == Kind.RELEASE:
            with self._lock:
                self._release(worker, header)
        elif kind in (Kind.DECLARE, Kind.OPTIMIZER):
            message = connection.read_control(header)
            with self._lock:
                self._core.declare(worker, message) if kind == Kind.DECLARE else self._core.optimize(message)
            outbox.put(Header(Kind.DONE).pack())
        elif kind == Kind.INIT:
            buffer = self._receive(connection, worker, header, initial=True)
            with self._lock:
                self._core.initialise(worker, header.key, header.slice, buffer.array)
                self._core.give_back(header.key, header.slice, buffer)
            outbox.put(Header(Kind.DONE).pack())
        elif kind == Kind.READ_STATE:
            state = self.pack_state()
            outbox.put(Header(Kind.STATE, len(state)).pack(), memoryview(state))
        elif kind == Kind.STATE:
            self._restore(connection, header)
            outbox.put(Header(Kind.DONE).pack())
        else:
            raise FrameError(f"frame kind {kind} from a worker")

    def _push(self, connection: Link, worker: int, header: Header) -> None:
        buffer = self._receive(connection, worker, header)
        now = time.monotonic()
        with self._lock:
            actions = self._core.push(worker, header.key, header.slice, header.round, header.number, buffer, now)
            if header.flags & Flag.PULL:
                actions += self._core.pull(worker, header.key, header.slice, header.round, now, header.priority)
            works = self._act(actions)
        if buffer.kind == "lent" and buffer.array.nbytes > AT_ONCE_BYTES and works:
            self._pool.submit(self._carry_out, works)
        else:  # what has just been received is in this core's cache
            self._carry_out(works)
        with self._progress:  # nobody fills this server's memory with steps that it cannot make in time
            self._progress.wait_for(lambda: self._core.backlog(header.key, header.slice) <= MAX_BACKLOG, REST_SECONDS)

    def _receive(self, connection: Link, worker: int, header: Header, initial: bool = False) -> Buffer:
        if header.flags & Flag.SHARED:
            return self._lent(connection, worker, header)
        with self._lock:
            buffer = self._core.buffer(worker, header.key, header.slice, header.length, header.dtype, initial)
        if header.length:
            connection.read_into(memoryview(buffer.array).cast("B"))
        return buffer

    def _lent(self, connection: Link, worker: int, header: Header) -> Buffer:
        if connection.peer_arena is None:
            raise FrameError("a payload in shared memory, but none is shared")
        try:
            data = connection.peer_arena.view(header.place, header.length)
        except ValueError as error:
            raise FrameError(str(error)) from error
        with self._lock:
            return self._core.lend(worker, header.key, header.slice, data, header.dtype)

    def _restore(self, connection: Link, header: Header) -> None:
        if header.length > self.state_limit():
            raise FrameError(f"optimizer state of {header.length} bytes is larger than this server's slices can have")
        data = bytearray(header.length)
        connection.read_into(memoryview(data))
        self.unpack_state(data)

    def pack_state(self) -> bytes:
        """What this server keeps beyond a job's end, for checkpoints."""
        with self._progress:
            self._progress.wait_for(lambda: self._core.rests, REST_SECONDS)
            return optimizer_state.pack(self._core.slices())

    def state_limit(self) -> int:
        """The most bytes that a state for this server can have."""
        with self._lock:
            return optimizer_state.limit(self._core.slices())

    def unpack_state(self, data: bytearray) -> None:
        """Put back what `pack_state` gave. Raises Rejected."""
        with self._progress:
            self._progress.wait_for(lambda: self._core.rests, REST_SECONDS)
            optimizer_state.unpack(data, self._core.slices())

    def _act(self, actions: list[Action]) -> list[Work]:
        """Send the replies; returns the work, for `_carry_out` without the lock. Called with the lock held."""
        works = []
        for action in actions:
            if isinstance(action, Work):
                works.append(action)
            else:
                self._reply(action)
        return works

    def _carry_out(self, works: list[Work]) -> None:
        try:
            while works:
                work = works.pop()
                work.run()
                with self._lock:
                    works += self._act(self._core.done(work, time.monotonic()))
                    self._progress.notify_all()
        except Exception as error:  # an optimizer that cannot step, or a defect: the job must end at once, and say so
            if not isinstance(error, Rejected):
                traceback.print_exc()
            self._control.abort(f"{self._name}: {error}")

    def _reply(self, reply: Reply) -> None:
        outbox, buffer = self._outboxes.get(reply.worker), reply.buffer
        if outbox is None:
            return self._core.release(reply)
        shared = buffer.place is not None and outbox.link.own_arena is not None
        header = Header(Kind.VALUE, buffer.array.nbytes, reply.worker, reply.key, reply.slice, reply.round,
                        reply.staleness, reply.dtype, Flag.SHARED if shared else 0, buffer.place or 0, reply.waited,
                        reply.worked)
        if shared:
            self._held.setdefault((reply.worker, reply.key, reply.slice, header.place), []).append(reply)
            outbox.put(header.pack(), priority=reply.priority)
        else:
            data = memoryview(buffer.array).cast("B") if buffer.array.nbytes else memoryview(b"")
            outbox.put(header.pack(), data, reply.priority, functools.partial(self._sent, reply))

    def _sent(self, reply: Reply) -> None:
        with self._lock:
            self._core.release(reply)

    def _release(self, worker: int, header: Header) -> None:
        replies = self._held.get((worker, header.key, header.slice, header.place))
        if not replies:
            raise FrameError(f"a release of key {header.key} slice {header.slice} that was not given")
        self._core.release(replies.pop())

    def _release_all(self, worker: int) -> None:
        for place, replies in self._held.items():
            while place[0] == worker and replies:
                self._core.release(replies.pop())


def _share(transport: str) -> tuple[Arena | None, tuple[socket.socket, str] | None]:
    """Memory to share and the socket to meet at; None where there is none, or is not wanted."""
    if transport == "tcp":
        return None, None
    try:
        arena = Arena()
    except ArenaError as error:
        log(f"no shared memory: {error}; using TCP")
        return None, None
    met = meeting.listen()
    return (arena, met) if met else (None, None)


def _listen(host: str) -> socket.socket:
    try:
        return link.listen(host)
    except OSError as error:
        raise UserError(f"this server cannot listen on DMLC_NODE_HOST={host}: {error.strerror}; "
                        "give an address of this host") from error


def make_step(spec: dict[str, Any], key: int, value: Any) -> Any:
    """An optimizer's step on one slice; the framework is imported only when a job wants optimizers on its servers."""
    from dmltrain.backends import torch_optimizer

    try:
        return torch_optimizer.Step(spec, key, value)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise Rejected(f"this optimizer cannot be made: {error}") from error
