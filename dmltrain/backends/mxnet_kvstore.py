"""MXNet's own kvstores (ps-lite) behind dmltrain's KVStore, without their faults: a worker's side.

Gradients and weights travel by MXNet's `kv.push` and `kv.pull`. Beside it stands dmltrain's own store (`_side`): it is
the worker's place in the job (its rank is the launcher's number, the same in every run, which MXNet's is not), it
notices who is lost, and it adds up what is small. docs/mxnet.md lists what is mended, and how.

NDArrays are pushed and pulled as MXNet does: asynchronously, in the order of MXNet's engine. `pushpull` is a push and
a pull, because MXNet's own aborts with gradient compression (src/kvstore/kvstore_dist.h, PushPullImpl).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends import mxnet_command, mxnet_compat, mxnet_exit, mxnet_optimizer, mxnet_ps
from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError, exit_now, stuck
from dmltrain.kvstore.base import Handle, Key, Keys, KVStore, keys_and_values
from dmltrain.kvstore.dist import DistKVStore
from dmltrain.kvstore.state_file import read_state, write_whole

COMPRESSED = 16  # 2-bit compression: bits of a float32 over those that travel


class MXNetKVStore(KVStore):
    """dist_sync and dist_async of MXNet 1.9.1. Raises UserError or JobLost."""

    def __init__(self, kind: str, meaning: str, staleness: float, environment: Environment) -> None:
        if meaning == "dist_ssp":
            raise UserError("MXNet has no kvstore with bounded staleness (dist_ssp): use dist_sync or dist_async, or "
                            "--backend torch")
        mxnet_ps.check(environment)
        mx = self._mx = mxnet_compat.load()  # seconds in which no sign of life leaves this process
        self.type, self._together = kind, meaning == "dist_sync"
        self._side = DistKVStore(kind, meaning, staleness, environment, exit_seconds=mxnet_ps.EXIT_SECONDS)
        self.rank, self.num_workers = self._side.rank, self._side.num_workers
        self._side.all_reduce("kvstore", np.zeros(1))  # refuses workers with another --kv-store
        self._kv = mxnet_ps.join(mx, environment, self._side.facts, kind)
        self.kv_rank: int = self._kv.rank
        self._numbers: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}  # bytes
        self._rate: float | None = None
        self._stepping = False
        self._compression = 1
        self._sent = self._received = 0
        self._closed = False
        self._process = os.getpid()
        mxnet_exit.notice()
        atexit.register(self._at_exit)  # after, hence run before, the side store's

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Of values, as computed from their sizes: ps-lite does not count."""
        return self._sent + self._side.bytes_sent

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return self._received + self._side.bytes_received

    # -- values ---------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any) -> None:
        """The values that count are those of the worker whose `kv_rank` is 0, which may be any: give the same."""
        keys, values = keys_and_values(key, value)
        firsts = [self._array(item[0] if isinstance(item, (list, tuple)) else item) for item in values]
        for name, array in zip(keys, firsts, strict=True):
            if name in self._numbers:
                raise UserError(f"kvstore: key {name!r} was given to init before")
            self._numbers[name] = len(self._numbers)
            self._sizes[name] = 4 * array.size
        self._agree([(str(name), array.shape) for name, array in zip(keys, firsts, strict=True)])
        self._kv.init([self._numbers[name] for name in keys], firsts)
        self._mx.nd.waitall()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        if not self._together and not self._stepping:
            raise UserError(f"kvstore {self.type} makes the optimizer's step on the servers: call set_optimizer first "
                            "(MXNet's servers would abort)")
        if rate >= 0.0:
            self.set_learning_rate(rate)
        for name, item in zip(*keys_and_values(key, value), strict=True):
            number = self._find(name)
            self._kv.push(number, self._arrays(item), priority=priority)
            self._sent += -(-self._sizes[name] // self._compression)

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = False) -> Handle:
        """Into NDArrays asynchronously unless `wait`, into numpy arrays at once."""
        keys, targets = keys_and_values(key, out)
        for name, target in zip(keys, targets, strict=True):
            targets_of_key = list(target) if isinstance(target, (list, tuple)) else [target]
            landing = self._arrays(targets_of_key)
            self._kv.pull(self._find(name), landing, priority=priority)
            self._received += self._sizes[name]
            for given, landed in zip(targets_of_key, landing, strict=True):
                if given is not landed:
                    given[...] = landed.asnumpy()
                elif wait:
                    landed.wait_to_read()
        return Handle(0, "pull", 0.0)

    def barrier(self) -> None:
        self._side.barrier()

    def all_reduce(self, name: str, array: np.ndarray) -> np.ndarray:
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

    def key_number(self, key: Key) -> int:
        return self._find(key)

    def optimizer_states(self) -> list[bytearray]:
        self._mx.nd.waitall()
        return self._side.optimizer_states()

    def load_optimizer_state_bytes(self, states: list[bytes]) -> None:
        """Every server gets the states of all, and takes its own by its rank in ps-lite."""
        count = len(self._side.facts["servers"])
        if len(states) != count:
            raise UserError(f"the optimizer's state is of a job with {len(states)} servers, this one has {count}: "
                            f"continue with -s {len(states)}")
        self._side.load_optimizer_state_bytes([_merged(states)] * count if self.rank == 0 else [b""] * count)

    def save_optimizer_states(self, path: str) -> None:
        """One file a server, as dmltrain's own store: `path`.server-K."""
        for number, state in enumerate(self.optimizer_states()):
            write_whole(Path(f"{path}.server-{number}"), state)

    def load_optimizer_states(self, path: str) -> None:
        count = len(self._side.facts["servers"])
        self.load_optimizer_state_bytes([read_state(f"{path}.server-{number}") for number in range(count)])

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
        exit_now(code)  # as Python would, if it could

    # -- inside ---------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, value: Any) -> None:
        """Returns when every server has done it."""
        self._kv._send_command_to_servers(mxnet_command.HEAD, mxnet_command.encode(kind, value))

    def _agree(self, declared: list[tuple[str, tuple[int, ...]]]) -> None:
        """Raise UserError unless all workers give the same keys and shapes: ps-lite would abort, or mix them up."""
        own = float(int.from_bytes(hashlib.sha256(repr(declared).encode()).digest()[:4], "little"))
        slots = np.zeros(self.num_workers)
        slots[self.rank] = own
        others = self._side.all_reduce("keys", slots)
        different = [worker for worker, value in enumerate(others) if value != own]
        if different:
            raise UserError(f"worker {different[0]} gives kvstore.init other keys or shapes than worker {self.rank}: "
                            "all workers must train the same model")

    def _arrays(self, value: Any) -> list[Any]:
        return [self._array(item) for item in (value if isinstance(value, (list, tuple)) else [value])]

    def _array(self, value: Any) -> Any:
        native = isinstance(value, self._mx.nd.NDArray)
        array = value if native else np.asarray(value)
        if np.dtype(array.dtype) != np.float32:
            raise UserError(f"kvstore: MXNet's servers compute in float32, this value is {np.dtype(array.dtype).name}: "
                            "give float32")
        return array if native else self._mx.nd.array(array)

    def _find(self, name: Key) -> int:
        if name not in self._numbers:
            raise UserError(f"kvstore: key {name!r} was never given to init")
        return self._numbers[name]


def _merged(states: list[bytes]) -> bytes:
    """One npz of all servers' arrays; their names begin with the server's rank. Raises UserError."""
    arrays: dict[str, np.ndarray] = {}
    for state in states:
        try:
            with np.load(io.BytesIO(state), allow_pickle=False) as archive:
                arrays.update({name: archive[name] for name in archive.files})
        except Exception as error:  # zipfile and numpy raise a dozen types
            raise UserError(f"the optimizer's state cannot be read: {error}") from error
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()
