"""What every kvstore offers. Names and meaning are MXNet's (mxnet/python/mxnet/kvstore/kvstore.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.state_file import read_state, write_whole
from dmltrain.kvstore.waiting import Trip, Waits

Key = int | str
Keys = Key | Sequence[Key]

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
READ: Any = object()  # in place of `out`: the handle's `values` are read where they are


class Handle:
    """Something under way: `wait` returns when all of it is done, or raises JobLost.

    `values`, of a pull with READ, after `wait`: one flat read-only array a key, valid until the key's next push.
    """

    def __init__(
        self, count: int, what: str, seconds: float, waited: Callable[[Trip | None, float, float], None] | None = None
    ) -> None:
        """`waited(trip, since, until)` is called after each wait that took time, with the trip that ended it."""
        self.values: list[Array] = []
        self._left = count
        self._what = what
        self._seconds = seconds
        self._waited = waited
        self._trip: Trip | None = None  # the last one
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._finish: list[Callable[[], None]] = []
        self.error = ""
        if count == 0:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._done.is_set()

    def one_done(self, trip: Trip | None = None) -> None:
        with self._lock:
            self._left -= 1
            self._trip = trip
            if self._left == 0:
                self._done.set()

    def fail(self, reason: str) -> None:
        self.error = reason
        self._done.set()

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` on the waiting thread when all has arrived (copies into memory that could not be filled in
        place).
        """
        self._finish.append(action)

    def wait(self) -> None:
        """Raises JobLost with the reason, or when the deadline passes (the message says what was awaited)."""
        if not self._done.is_set():
            since = time.perf_counter()
            if not self._done.wait(self._seconds):
                raise JobLost(f"{self._what}: no answer within {self._seconds:.0f} s (DMLTRAIN_WAIT_TIMEOUT)")
            if self._waited:
                self._waited(self._trip, since, time.perf_counter())
        if self.error:
            raise JobLost(self.error)
        while self._finish:
            self._finish.pop()()


class KVStore:
    """One worker's view of the store. Arrays are numpy arrays or CPU torch tensors of float32 or float64."""

    type: str = "local"
    rank: int = 0
    num_workers: int = 1
    num_servers: int = 0
    kv_rank: int | None = None  # of this worker in a framework's own kvstore, where that numbers workers itself
    bytes_sent: int = 0
    bytes_received: int = 0
    waits: Waits | None = None  # of the training thread so far; None where they are not counted
    _names: int = 0

    @property
    def is_distributed(self) -> bool:
        return self.kvstore_type.distributed

    @property
    def kvstore_type(self) -> types.KVStoreType:
        """What this store promises; `type` is the name by which it was asked for."""
        return types.find(self.type)

    def init(self, key: Keys, value: Any) -> None:
        """Declare keys with their first values; the values of worker 0 count. All workers call this alike."""
        raise NotImplementedError

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        """Give gradients. A list for one key is one value a device, summed here. Returns at once: the memory must not
        change until the key's next pull has returned. `rate`: the optimizer's learning rate from here on, if 0 or
        more."""
        raise NotImplementedError

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        """Fill `out` (an array, or a list for several keys) with the keys' values at this worker's clock; with READ no
        copy is made, see Handle."""
        raise NotImplementedError

    def buffers(self, keys: Sequence[Key]) -> list[Array]:
        """For each key flat memory (elements,) from which pushes travel without a copy: shared with servers on this
        host. The caller's to write, but for the time between a push of it and the return of the key's next pull."""
        raise NotImplementedError

    def pushpull(
        self, key: Keys, value: Any, out: Any = None, priority: int = 0, wait: bool = True, rate: float = -1.0
    ) -> Handle:
        """`push`, then `pull` into `out` (into `value` when not given)."""
        self.push(key, value, priority, rate)
        return self.pull(key, value if out is None else out, priority, wait)

    def barrier(self) -> None:
        """Wait for all workers."""

    def all_reduce(self, name: str, array: Array) -> Array:
        """The elementwise sum of all workers' arrays (float64), in every type of store; all workers call it alike."""
        return np.array(array, np.float64)

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        """Let the store make the optimizer's steps: {"name": "sgd", "lr": 0.1, "momentum": 0.9, ...}; JSON only."""
        raise NotImplementedError

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        """{"type": "none"}, or one of codec.TYPES with its parameter, in the distributed stores: what float32 weights'
        pushes and results travel as. All workers call it alike, before `init`."""
        kind = parameters.get("type", "none") if isinstance(parameters, dict) else parameters
        if kind != "none":
            raise UserError(f"gradient compression {kind!r} is not available; choose none")

    def new_name(self, what: str) -> str:
        """`what` with a number, different at each call; workers that call alike get the same."""
        self._names += 1
        return f"{what} {self._names}"

    def key_number(self, key: Key) -> int:
        """The number by which an optimizer's spec names the key (its "keys")."""
        raise NotImplementedError

    def optimizer_states(self) -> list[bytearray]:
        """Each server's weights and optimizer state, as bytes."""
        raise NotImplementedError

    def load_optimizer_state_bytes(self, states: Sequence[bytes]) -> None:
        """Worker 0 gives the servers what `optimizer_states` returned; the others wait. Raises UserError, JobLost."""
        raise NotImplementedError

    def residuals(self) -> dict[str, Array]:
        """On worker 0 the residuals of gradient compression, as flat arrays by name, for a checkpoint. All workers call
        it alike, while no push is under way. Empty where there are none."""
        return {}

    def load_residuals(self, residuals: dict[str, Array]) -> None:
        """Restore what `residuals` returned, after `init`; all workers call it alike. With another number of workers
        worker 0 gets the sum of theirs; with another number of servers the servers' are lost. Raises UserError when
        they are of another model."""

    def save_optimizer_states(self, path: str) -> None:
        """One file a server beside `path`: `path`.server-K. Written whole or not at all."""
        for number, state in enumerate(self.optimizer_states()):
            write_whole(Path(f"{path}.server-{number}"), state)

    def load_optimizer_states(self, path: str) -> None:
        """Worker 0 gives the servers what `save_optimizer_states` wrote; the others wait."""
        names = [f"{path}.server-{number}" for number in range(self.num_servers)]
        self.load_optimizer_state_bytes([read_state(name) for name in names])

    def measure_limits(self) -> str:
        """Measure once, before training, what the network and this host's memory carry, for `bound`; all workers call
        it alike. Returns what was found, in words; "" where there is nothing to hold training against."""
        return ""

    def carried(self) -> Any:
        """What this worker's links have carried so far, for `bound`; None before `measure_limits`."""

    def bound(self, carried: Any, took: float) -> float:
        """The least seconds in which this worker's host could have carried its share of what all workers' links did in
        `took` seconds, `carried` being this worker's: a difference of two `carried()`. All workers call it alike."""
        return 0.0

    def abort(self, reason: str) -> None:
        """This worker has failed: end the job for all processes, with `reason` in every process's message."""

    def take_staleness(self) -> float | None:
        """Since the last call: updates of a slice by others between this worker's pull of it and its push, mean; None
        where they are not counted."""
        return 0.0

    def close(self) -> None:
        """This worker is done. The job goes on until every worker has closed."""


def keys_and_values(key: Keys, value: Any) -> tuple[list[Key], list[Any]]:
    """One key and its value, or lists of both, as lists. Raises UserError when the lengths differ."""
    if isinstance(key, (int, str)):
        return [key], [value]
    keys, values = list(key), list(value)
    if len(keys) != len(values):
        raise UserError(f"kvstore: {len(keys)} keys but {len(values)} values")
    return keys, values


def as_array(value: Any) -> Array:
    """A numpy view of an array or CPU tensor, no copy."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach()
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        value = value.cpu()
    return np.asarray(value)


def summed(value: Any) -> Array:
    """The gradient as one flat, contiguous array of float32 or float64; a list or tuple is one value a device,
    summed.
    """
    if isinstance(value, (list, tuple)):
        total = as_array(value[0])
        if len(value) > 1:
            total = np.array(total)
            for other in value[1:]:
                total += as_array(other)
    else:
        total = as_array(value)
    if total.dtype not in FLOATS:
        raise UserError(f"kvstore: values are float32 or float64, this one is {total.dtype.name}")
    return np.ascontiguousarray(total).reshape(-1)
