"""A server's process: moves bytes between workers and ServerCore; one reading and one sending thread a worker."""

from __future__ import annotations

import functools
import socket
import threading
import time
import traceback
from typing import Any

from dmltrain.env import Environment
from dmltrain.errors import UserError
from dmltrain.kvstore import link, optimizer_state, wire
from dmltrain.kvstore.control import EXIT_SECONDS, Control
from dmltrain.kvstore.link import Closed, Link, Outbox
from dmltrain.kvstore.scheduler_process import accept_loop, log
from dmltrain.kvstore.server import Rejected, Reply, ServerCore
from dmltrain.kvstore.wire import FrameError, Header, Kind

OVERDUE_SECONDS = 1.0  # between two looks at who keeps others waiting
DRAIN_SECONDS = 1.0  # for answers still queued when a link ends


class ServerProcess:
    """Serves one job's slices. `run` returns the reason why the job was lost, empty when it went well."""

    def __init__(self, environment: Environment, exit_seconds: float = EXIT_SECONDS) -> None:
        self._environment = environment
        self._core = ServerCore(environment.num_workers, make_step=make_step, wait_seconds=environment.wait_seconds)
        self._lock = threading.Lock()  # guards _core
        self._outboxes: dict[int, Outbox] = {}
        self._listening = _listen(environment.node_host)
        self._name = f"server {environment.index}"
        self._ended = threading.Event()
        self._control = Control(environment, self._listening.getsockname()[1], on_end=lambda reason: self._ended.set(),
                                exit_seconds=exit_seconds)

    def run(self) -> str:
        threading.Thread(target=accept_loop, name="accept", daemon=True,
                         args=(self._listening, self._environment, self._name, self._serve)).start()
        while not self._ended.wait(OVERDUE_SECONDS):
            with self._lock:
                reason = self._core.overdue(time.monotonic())
            if reason:
                self._control.abort(reason)
        self._control.close()
        return self._control.failure

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
            self._reply(self._core.finish(worker))

    def _take(self, connection: Link, outbox: Outbox, worker: int, header: Header) -> None:
        kind = header.kind
        if kind == Kind.PUSH:
            self._push(connection, worker, header)
        elif kind == Kind.PULL:
            with self._lock:
                self._reply(self._core.pull(worker, header.key, header.slice, header.round, time.monotonic()))
        elif kind in (Kind.DECLARE, Kind.OPTIMIZER):
            message = connection.read_control(header)
            with self._lock:
                self._core.declare(worker, message) if kind == Kind.DECLARE else self._core.optimize(message)
            outbox.put(Header(Kind.DONE).pack())
        elif kind == Kind.INIT:
            buffer = self._receive(connection, worker, header)
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
        with self._lock:
            self._reply(self._core.push(worker, header.key, header.slice, header.round, header.number, buffer,
                                        time.monotonic()))

    def _receive(self, connection: Link, worker: int, header: Header) -> Any:
        with self._lock:
            buffer = self._core.buffer(worker, header.key, header.slice, header.length, header.dtype)
        if header.length:
            connection.read_into(memoryview(buffer.array).cast("B"))
        return buffer

    def _restore(self, connection: Link, header: Header) -> None:
        if header.length > self.state_limit():
            raise FrameError(f"optimizer state of {header.length} bytes is larger than this server's slices can have")
        data = bytearray(header.length)
        connection.read_into(memoryview(data))
        self.unpack_state(data)

    def pack_state(self) -> bytes:
        """What this server keeps beyond a job's end, for checkpoints."""
        with self._lock:
            return optimizer_state.pack(self._core.slices())

    def state_limit(self) -> int:
        """The most bytes that a state for this server can have."""
        with self._lock:
            return optimizer_state.limit(self._core.slices())

    def unpack_state(self, data: bytearray) -> None:
        """Put back what `pack_state` gave. Raises Rejected."""
        with self._lock:
            optimizer_state.unpack(data, self._core.slices())

    def _reply(self, replies: list[Reply]) -> None:
        for reply in replies:
            outbox = self._outboxes.get(reply.worker)
            if outbox is None:
                self._core.release(reply)
                continue
            data = memoryview(reply.buffer.array)
            data = data.cast("B") if data.nbytes else memoryview(b"")
            header = Header(Kind.VALUE, data.nbytes, reply.worker, reply.key, reply.slice, reply.round, reply.staleness,
                            wire.DTYPES.index(reply.buffer.array.dtype.name))
            outbox.put(header.pack(), data, sent=functools.partial(self._sent, reply))

    def _sent(self, reply: Reply) -> None:
        with self._lock:
            self._core.release(reply)


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
