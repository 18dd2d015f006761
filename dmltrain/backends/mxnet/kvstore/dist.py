"""The worker's side of MXNet's distributed kvstores (ps-lite), as a KVStore of dmltrain without their defects.

Gradients and weights go through MXNet's `kv.push` and `kv.pull`. In addition the worker has a store of dmltrain
(`_side`). That store provides the rank, which is the launcher's and the same in every run, unlike MXNet's; it detects
lost processes, and sums small arrays. docs/mxnet.md lists the defects, and how they are avoided.

No worker waits forever in ps-lite: PullDeadline ends the job if a value is awaited for too long.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import io
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet import ps_lite as mxnet_ps
from dmltrain.backends.mxnet.compat import exit as mxnet_exit
from dmltrain.backends.mxnet.kvstore.base import MXNetStore, arrays_of
from dmltrain.backends.mxnet.server import command as mxnet_command
from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError, stuck
from dmltrain.kvstore.base import Key, Keys, check_rate, keys_and_values
from dmltrain.kvstore.worker.store import DistKVStore

COMPRESSED = 16  # compression factor of 2bit: 32 bits of a float32 become 2
CHECK_SECONDS = 1.0  # between two checks of PullDeadline


class MXNetKVStore(MXNetStore):
    """MXNet 1.9.1's dist_sync and dist_async, whose servers compute in float32. Raises UserError or JobLost."""

    dtypes: tuple[str, ...] = ("float32",)

    def __init__(self, kind: str, staleness: float, environment: Environment) -> None:
        self.type = kind
        mxnet_ps.check(environment)
        super().__init__(mxnet_compat.load())  # takes seconds, in which this process sends no heartbeat
        self._steps_together = self.kvstore_type.synchronous
        beside = replace(environment, host_sum="off")  # no weights go through it
        self._side = DistKVStore(kind, staleness, beside, exit_seconds=mxnet_ps.EXIT_SECONDS)
        self.rank, self.num_workers = self._side.rank, self._side.num_workers
        self.num_servers = self._side.num_servers
        self._side.all_reduce("kvstore", np.zeros(1))  # fails if workers have different --kv-store
        self._kv = mxnet_ps.join(self._mx, environment, self._side.start_message.facts, kind)
        self.kv_rank: int = self._kv.rank
        self._rate: float | None = None
        self._has_optimizer = False
        self._compression = 1
        self._last_pulled: dict[Key, Any] = {}  # since the key's last push
        self._sent = self._received = 0
        self._closed = False
        self._deadline = PullDeadline(environment.wait_seconds, self._overdue)
        self._process = os.getpid()
        mxnet_exit.notice()
        atexit.register(self._at_exit)  # registered after, hence run before, that of _side

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]  # computed here
        """Bytes of values, computed from their sizes, because ps-lite does not count."""
        return self._sent + self._side.bytes_sent

    @property
    def bytes_received(self) -> int:  # type: ignore[override]  # computed here
        return self._received + self._side.bytes_received

    # -- values ---------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any, whole: bool = False, mean: bool = False) -> None:
        """The values are those of the worker with `kv_rank` 0, which can be any worker; so all must give the same."""
        super().init(key, value)
        self._mx.nd.waitall()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        """If the pushed array is not itself the target of the key's last pull, wait for that pull first: MXNet would
        not order the two, and the pull could get the value after this push."""
        if not self._steps_together and not self._has_optimizer:
            raise UserError(
                f"kvstore {self.type} runs the optimizer on the servers: call set_optimizer first (MXNet's servers "
                "would abort)"
            )
        for name, item in zip(*keys_and_values(key, value), strict=True):
            pulled = self._last_pulled.pop(name, None)
            if pulled is not None and not any(array is pulled for array in arrays_of(item)):
                pulled.wait_to_read()
        super().push(key, value, priority, rate)

    def _pushed(self, key: Key) -> None:
        self._sent += -(-4 * math.prod(self._shapes[key]) // self._compression)

    def _pulled(self, key: Key, value: Any) -> None:
        self._received += 4 * math.prod(self._shapes[key])
        self._last_pulled[key] = value
        self._deadline.watch(key, value)

    def _overdue(self, key: Key, seconds: float) -> None:
        self._side.lose(
            f"waited {seconds:.0f} s for key {key!r}, because another worker does not push it: all workers must make "
            "the same number of steps (DMLTRAIN_WAIT_TIMEOUT)"
        )

    def barrier(self) -> None:
        self._side.barrier()

    def all_reduce(self, name: str, array: Array) -> Array:
        return self._side.all_reduce(name, array)

    def broadcast(self, values: Array, needed: bool = True, source: int = 0) -> None:
        self._side.broadcast(values, needed, source)

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        """{"type": "2bit", "threshold": 0.5} or {"type": "none"}. All workers must call this, before `init`."""
        kind = parameters.get("type", "none")
        if kind == "none":
            return
        if kind != "2bit" or self._numbers:
            raise UserError(f"gradient compression {kind!r}: MXNet has 2bit and none, and it must be set before init")
        threshold = parameters.get("threshold", 0.5)
        if not isinstance(threshold, (int, float)) or not 0.0 < threshold < float("inf"):
            raise UserError(f"gradient compression's threshold {threshold!r}: expected a positive number")
        self._kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        self._compression = COMPRESSED
        self.barrier()

    # -- optimizer on the servers ---------------------------------------------------------------------------------

    def set_optimizer(self, spec: Any) -> None:
        """`spec` is that of optimizer.py, or an mx.optimizer.Optimizer of one of its classes, equal on all workers."""
        if isinstance(spec, self._mx.optimizer.Optimizer):
            spec = mxnet_optimizer.spec_of(spec)
        try:
            mxnet_optimizer.make(spec)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"this optimizer cannot be made: {error}") from error
        self._check_whole(spec)
        if self.rank == 0:
            self._command("optimizer", spec)
        self._rate, self._has_optimizer = spec.get("lr"), True
        self.barrier()

    def _check_whole(self, spec: Mapping[str, Any]) -> None:
        """Raise UserError if the optimizer needs whole keys, and ps-lite has divided some over the servers."""
        largest = max(self._shapes.values(), key=math.prod, default=())
        if self.num_servers > 1 and math.prod(largest) >= divided_from() and not mxnet_optimizer.is_elementwise(spec):
            raise UserError(
                f"optimizer {spec['name']} needs whole weights, and MXNet divides those of {divided_from()} elements "
                f"and more over its servers (one is {largest}): use --update-on-kvstore 0 (not with dist_async), one "
                "server (-s 1), or --backend torch"
            )

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate for the steps of this worker's next pushes. With dist_sync worker 0 sends the rate to
        the servers, after all earlier steps. Each step needs worker 0's push, so no step uses a wrong rate."""
        check_rate(rate)
        if not self._has_optimizer or rate == self._rate:
            return
        self._rate = rate
        if self.rank == 0 or not self._steps_together:
            self._mx.nd.waitall()
            self._command("learning_rate", float(rate))

    def optimizer_states(self) -> list[bytearray]:
        self._mx.nd.waitall()
        return self._side.optimizer_states()

    def load_optimizer_state_bytes(self, states: Sequence[bytes]) -> None:
        """Send the states of all servers to every server, which loads its own by its rank in ps-lite."""
        merged = _merged(states) if self.rank == 0 else b""  # the other workers only wait
        self._side.load_optimizer_state_bytes([merged] * len(states))

    # -- the end --------------------------------------------------------------------------------------------------

    def take_staleness(self) -> None:
        return None  # ps-lite does not count it

    def abort(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._kv.handle = ctypes.c_void_p()  # so that the store is not freed, which would wait for all others
            stuck()
            self._side.abort(reason)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._mx.nd.waitall()
            self.barrier()
        except BaseException as error:  # so that neither a second close nor ps-lite waits
            self.abort(str(error) or type(error).__name__)
            raise
        self._closed = True
        # Free the store here, and leave the destructor of MXNet's object (mxnet/kvstore/kvstore.py) nothing to free.
        handle, self._kv.handle = self._kv.handle, ctypes.c_void_p()
        self._mx.base.check_call(self._mx.base._LIB.MXKVStoreFree(handle))  # waits for all, then the servers stop
        self._side.close()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # this is a forked child
        code = mxnet_exit.failure()
        try:
            if not code:
                return self.close()
            kind = getattr(sys, "last_type", None)
            self.abort(f"ended by {kind.__name__}: {sys.last_value}" if kind else f"ended with exit code {code}")
        except JobLost as error:
            sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {error}\n")
            code = error.exit_code
        stuck(code)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _command(self, kind: str, value: Any) -> None:
        """Send a command to all servers. Returns after every server has executed it."""
        self._kv._send_command_to_servers(mxnet_command.HEAD, mxnet_command.encode(kind, value))

    def _check_all(self, keys: list[Key]) -> None:
        """Raise UserError unless all workers declare the same keys and shapes: ps-lite would abort or confuse them."""
        declared = repr([(str(name), self._shapes[name]) for name in keys])
        own = float(int.from_bytes(hashlib.sha256(declared.encode()).digest()[:4], "little"))
        slots = np.zeros(self.num_workers)
        slots[self.rank] = own
        others = self._side.all_reduce("keys", slots)
        different = [worker for worker, value in enumerate(others) if value != own]
        if different:
            raise UserError(
                f"worker {different[0]} calls kvstore.init with other keys or shapes than worker {self.rank}: "
                "all workers must train the same model"
            )


class PullDeadline:
    """A deadline for pulls from ps-lite, which has none: calls `overdue(key, seconds)` once, when a value has been
    awaited for more than `limit` seconds.

    One thread waits for one pull at a time; pulls that begin meanwhile are not watched. Another thread watches the
    clock. Training steps do not become slower.
    """

    def __init__(self, limit: float, overdue: Callable[[Any, float], None]) -> None:
        self._limit, self._overdue = limit, overdue
        self._next: queue.Queue[tuple[Any, Any]] = queue.Queue(maxsize=1)
        self._awaited: tuple[Any, float] | None = None  # key, since when
        for work in (self._wait, self._check):
            threading.Thread(target=work, name="awaited values", daemon=True).start()

    def watch(self, key: Any, value: Any) -> None:
        """`value` (NDArray) is the target of a pull. Ignored while another value is awaited."""
        if self._awaited is None and self._next.empty():
            self._next.put((key, value))

    def _wait(self) -> None:
        while True:
            key, value = self._next.get()
            self._awaited = key, time.monotonic()
            try:
                value.wait_to_read()
            except Exception:  # the reader of the value gets the same error, and handles it
                continue
            finally:
                self._awaited = None

    def _check(self) -> None:
        while True:
            time.sleep(CHECK_SECONDS)
            awaited = self._awaited
            if awaited and time.monotonic() - awaited[1] > self._limit:
                return self._overdue(awaited[0], time.monotonic() - awaited[1])


def divided_from() -> int:
    """The elements from which on ps-lite divides an array (src/kvstore/kvstore_dist.h, bigarray_bound_)."""
    return int(os.environ.get("MXNET_KVSTORE_BIGARRAY_BOUND") or 1_000_000)


def _merged(states: Sequence[bytes]) -> bytes:
    """One npz of all servers' arrays; each name starts with the server's rank. Raises UserError."""
    arrays: dict[str, Array] = {}
    for state in states:
        try:
            arrays.update(npz.read(state))
        except ValueError as error:
            raise UserError(f"the optimizer's state cannot be read: {error}") from error
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()
