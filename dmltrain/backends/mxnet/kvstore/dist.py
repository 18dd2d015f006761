"""MXNet's own kvstores (ps-lite) behind dmltrain's KVStore, without their faults: a worker's side.

Gradients and weights travel by MXNet's `kv.push` and `kv.pull`. Beside it stands dmltrain's own store (`_side`): it is
the worker's place in the job (its rank is the launcher's number, the same in every run, which MXNet's is not), it
notices who is lost, and it adds up what is small. docs/mxnet.md lists what is mended, and how.

Nobody waits in ps-lite for ever: a watch (mxnet_wait) ends the job when a value is awaited for too long.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dmltrain.arrays import Array
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet import ps_lite as mxnet_ps
from dmltrain.backends.mxnet.compat import exit as mxnet_exit
from dmltrain.backends.mxnet.kvstore.base import MXNetStore
from dmltrain.backends.mxnet.kvstore.deadline import Wait
from dmltrain.backends.mxnet.server import command as mxnet_command
from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError, stuck
from dmltrain.kvstore.base import Key, Keys
from dmltrain.kvstore.worker.store import DistKVStore

COMPRESSED = 16  # 2-bit compression: bits of a float32 over those that travel


class MXNetKVStore(MXNetStore):
    """dist_sync and dist_async of MXNet 1.9.1, whose servers compute in float32. Raises UserError or JobLost."""

    dtypes: tuple[str, ...] = ("float32",)

    def __init__(self, kind: str, staleness: float, environment: Environment) -> None:
        self.type = kind
        if self.kvstore_type.takes_staleness:
            raise UserError(
                f"MXNet has no kvstore with bounded staleness ({kind}): use dist_sync or dist_async, or --backend torch"
            )
        mxnet_ps.check(environment)
        super().__init__(mxnet_compat.load())  # takes seconds, in which this process sends no heartbeat
        self._together = self.kvstore_type.synchronous
        beside = replace(environment, host_sum="off")  # it carries no weights
        self._side = DistKVStore(kind, staleness, beside, exit_seconds=mxnet_ps.EXIT_SECONDS)
        self.rank, self.num_workers = self._side.rank, self._side.num_workers
        self.num_servers = self._side.num_servers
        self._side.all_reduce("kvstore", np.zeros(1))  # refuses workers with another --kv-store
        self._kv = mxnet_ps.join(self._mx, environment, self._side.start.facts, kind)
        self.kv_rank: int = self._kv.rank
        self._rate: float | None = None
        self._stepping = False
        self._compression = 1
        self._sent = self._received = 0
        self._closed = False
        self._wait = Wait(environment.wait_seconds, self._overdue)
        self._process = os.getpid()
        mxnet_exit.notice()
        atexit.register(self._at_exit)  # after, hence run before, the side store's

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]  # computed here
        """Of values, as computed from their sizes: ps-lite does not count."""
        return self._sent + self._side.bytes_sent

    @property
    def bytes_received(self) -> int:  # type: ignore[override]  # computed here
        return self._received + self._side.bytes_received

    # -- values ---------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any) -> None:
        """The values that count are those of the worker whose `kv_rank` is 0, which may be any: give the same."""
        super().init(key, value)
        self._mx.nd.waitall()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        if not self._together and not self._stepping:
            raise UserError(
                f"kvstore {self.type} makes the optimizer's step on the servers: call set_optimizer first "
                "(MXNet's servers would abort)"
            )
        super().push(key, value, priority, rate)

    def _pushed(self, key: Key) -> None:
        self._sent += -(-4 * math.prod(self._shapes[key]) // self._compression)

    def _pulled(self, key: Key, landing: Any) -> None:
        self._received += 4 * math.prod(self._shapes[key])
        self._wait.watch(key, landing)

    def _overdue(self, key: Key, seconds: float) -> None:
        self._side.lose(
            f"key {key!r} is awaited for {seconds:.0f} s, because another worker does not push it: all "
            "workers must make the same number of steps (DMLTRAIN_WAIT_TIMEOUT)"
        )

    def barrier(self) -> None:
        self._side.barrier()

    def all_reduce(self, name: str, array: Array) -> Array:
        return self._side.all_reduce(name, array)

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        """{"type": "2bit", "threshold": 0.5} or {"type": "none"}; before `init`, by all workers."""
        kind = parameters.get("type", "none")
        if kind == "none":
            return
        if kind != "2bit" or self._numbers:
            raise UserError(f"gradient compression {kind!r}: MXNet has 2bit and none, and it must be set before init")
        threshold = parameters.get("threshold", 0.5)
        if not isinstance(threshold, (int, float)) or not 0.0 < threshold < float("inf"):
            raise UserError(f"gradient compression's threshold {threshold!r}: expected a number above 0")
        self._kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        self._compression = COMPRESSED
        self.barrier()

    # -- optimizer on the servers ---------------------------------------------------------------------------------

    def set_optimizer(self, spec: Any) -> None:
        """`spec` as of mxnet_optimizer, or an mx.optimizer.Optimizer of one of its classes; by all workers alike."""
        if isinstance(spec, self._mx.optimizer.Optimizer):
            spec = mxnet_optimizer.spec_of(spec)
        try:
            mxnet_optimizer.make(spec)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"this optimizer cannot be made: {error}") from error
        if self.rank == 0:
            self._tell("optimizer", spec)
        self._rate, self._stepping = spec.get("lr"), True
        self.barrier()

    def set_learning_rate(self, rate: float) -> None:
        """For the steps that this worker's next pushes take part in. With dist_sync worker 0 tells the servers, when
        the steps before are done; it takes part in every step, so none is made with the wrong rate."""
        if not self._stepping or rate == self._rate:
            return
        self._rate = rate
        if self.rank == 0 or not self._together:
            self._mx.nd.waitall()
            self._tell("learning_rate", float(rate))

    def optimizer_states(self) -> list[bytearray]:
        self._mx.nd.waitall()
        return self._side.optimizer_states()

    def load_optimizer_state_bytes(self, states: Sequence[bytes]) -> None:
        """Every server gets the states of all, and takes its own by its rank in ps-lite."""
        whole = _merged(states) if self.rank == 0 else b""  # the others only wait
        self._side.load_optimizer_state_bytes([whole] * len(states))

    # -- the end --------------------------------------------------------------------------------------------------

    def take_staleness(self) -> None:
        return None  # ps-lite does not count it

    def abort(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._kv.handle = ctypes.c_void_p()  # nobody frees the store: that waits for all others
            stuck()
            self._side.abort(reason)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._mx.nd.waitall()
            self.barrier()
        except BaseException as error:  # the end cannot be reached any more: neither again nor by ps-lite
            self.abort(str(error) or type(error).__name__)
            raise
        self._closed = True
        handle, self._kv.handle = self._kv.handle, ctypes.c_void_p()
        self._mx.base.check_call(self._mx.base._LIB.MXKVStoreFree(handle))  # waits for all, then the servers stop
        self._side.close()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child ends
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

    def _tell(self, kind: str, value: Any) -> None:
        """Returns when every server has done it."""
        self._kv._send_command_to_servers(mxnet_command.HEAD, mxnet_command.encode(kind, value))

    def _check_all(self, keys: list[Key]) -> None:
        """Raise UserError unless all workers give the same keys and shapes: ps-lite would abort, or mix them up."""
        declared = repr([(str(name), self._shapes[name]) for name in keys])
        own = float(int.from_bytes(hashlib.sha256(declared.encode()).digest()[:4], "little"))
        slots = np.zeros(self.num_workers)
        slots[self.rank] = own
        others = self._side.all_reduce("keys", slots)
        different = [worker for worker, value in enumerate(others) if value != own]
        if different:
            raise UserError(
                f"worker {different[0]} gives kvstore.init other keys or shapes than worker {self.rank}: "
                "all workers must train the same model"
            )


def _merged(states: Sequence[bytes]) -> bytes:
    """One npz of all servers' arrays; their names begin with the server's rank. Raises UserError."""
    arrays: dict[str, Array] = {}
    for state in states:
        try:
            with np.load(io.BytesIO(state), allow_pickle=False) as archive:
                arrays.update({name: archive[name] for name in archive.files})
        except Exception as error:  # zipfile and numpy raise a dozen types
            raise UserError(f"the optimizer's state cannot be read: {error}") from error
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()
