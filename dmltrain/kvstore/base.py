"""The interface of every kvstore. Names and semantics follow MXNet (mxnet/python/mxnet/kvstore/kvstore.py)."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import JobLost, UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.encoded import Encoding
from dmltrain.kvstore.ops import Ops
from dmltrain.kvstore.state_file import read_state, write_whole
from dmltrain.kvstore.waiting import Trip, Waits

Key = int | str
Keys = Key | Sequence[Key]
T = TypeVar("T")

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
READ: Any = object()  # in place of `out`: the values are read in place, through the handle's `values`


class ViewChanged(Exception):
    """The members of an elastic job have changed before this operation was complete on all of them, so it has no
    result. No error of the user or of this worker: `KVStore.repeat` catches it and runs the block of operations again;
    in a round of training the optimizer does, and pushes its gradients again."""


JOB_ENDED = "the job has come to its end"


class MembershipEnded(Exception):
    """This worker leaves the job normally: because it wants to, because the next view of a replay is without it, or
    because the job has ended before this worker could join. This is not an error."""

    ends_well = True  # a script that does not catch it: see errors.end_scripts_without_traceback


class Stopped(JobLost):
    """The job ends between two rounds, with too few workers. This one is still a member, and may save a checkpoint with
    the others before it leaves."""


class Handle:
    """An operation in progress: `wait` returns when it is complete, or raises JobLost or ViewChanged.

    `values`: after `wait` on a pull with READ, one flat read-only array for each key, valid until the key's next push.
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
        self._interruption: Exception | None = None
        if count == 0:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) immediately."""
        return self._done.is_set()

    def one_done(self, trip: Trip | None = None) -> None:
        self.some_done(1, trip)

    def some_done(self, count: int, trip: Trip | None) -> None:
        """`count` more parts of the operation are complete; `trip` is that of the last one."""
        with self._lock:
            self._left -= count
            self._trip = trip
            if self._left == 0:
                self._done.set()

    def fail(self, reason: str) -> None:
        self.error = reason
        self._done.set()

    def interrupt(self, job_ended: bool = False) -> None:
        """Each `wait`, now and later, raises ViewChanged, unless the operation is complete already; MembershipEnded if
        the job has ended."""
        with self._lock:
            if self._done.is_set():
                return
            changed = ViewChanged(f"{self._what}: the members of the job have changed")
            self._interruption = MembershipEnded(JOB_ENDED) if job_ended else changed
            self._done.set()

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` on the waiting thread when all parts have arrived. It copies values into memory that they could
        not be received into directly."""
        self._finish.append(action)

    def wait(self) -> None:
        """Raises JobLost with the reason, or after the time limit, with the name of the operation; ViewChanged or
        MembershipEnded after `interrupt`."""
        if not self._done.is_set():
            since = time.perf_counter()
            if not self._done.wait(self._seconds):
                raise JobLost(f"{self._what}: no answer within {self._seconds:.0f} s (DMLTRAIN_WAIT_TIMEOUT)")
            if self._waited:
                self._waited(self._trip, since, time.perf_counter())
        if self.error:
            raise JobLost(self.error)
        if self._interruption:
            raise self._interruption
        while self._finish:
            self._finish.pop()()


class KVStore:
    """One worker's view of the store. Arrays are numpy arrays or CPU torch tensors of float32 or float64."""

    type: str = "local"
    rank: int = 0
    num_workers: int = 1
    num_servers: int = 0
    kv_rank: int | None = None  # of this worker in a framework's own kvstore, if that assigns ranks itself
    bytes_sent: int = 0
    bytes_received: int = 0
    pushed: float = 0.0  # when the last push was handed over, s of time.perf_counter; in distributed stores
    waits: Waits | None = None  # of the training thread so far; None if they are not measured
    # Whether the job goes on with other members when a worker is lost. Then pushed memory must not change even after
    # the results have arrived.
    elastic: bool = False
    ops: Ops = Ops()  # in an elastic job an ElasticOps
    _names: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether, in an elastic job, this worker prepares to join; until then a sum is its own value."""
        return self.ops.is_alone

    @property
    def member(self) -> int:
        """This worker's number throughout the job: its rank at the start. (In an elastic job `rank` is its place among
        the present members, which changes.)"""
        return self.rank

    def members(self, ranks: Sequence[int]) -> list[int]:
        """The `member` numbers of the workers that have these ranks now."""
        view = self.ops.view
        return [view.members[rank] for rank in ranks] if view else list(ranks)

    @property
    def is_distributed(self) -> bool:
        return self.kvstore_type.distributed

    @property
    def kvstore_type(self) -> types.KVStoreType:
        """The guarantees of this store; `type` is the name that the caller used."""
        return types.find(self.type)

    def init(self, key: Keys, value: Any, whole: bool = False, mean: bool = False) -> None:
        """Declare keys with their initial values, which are those of worker 0. Every worker must make the same call.

        `whole`: keep each key on one server, for optimizers that take norms of a key; else large keys are divided.
        `mean`: while no optimizer runs on the servers, they give the mean of all workers' pushes in place of the
        sum, but not of keys with gradient compression; see `factor_to_mean`."""
        raise NotImplementedError

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        """Send gradients. A list for one key has one value for each device; they are summed here. In place of a value
        it may be Encoded, see `encodings`. Returns immediately: the memory must not change until the key's next pull
        has returned. `rate`: the optimizer's learning rate from now on, unless negative."""
        raise NotImplementedError

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        """Fill `out` (an array, or a list for several keys) with the keys' values at this worker's clock; with READ no
        copy is made, see Handle. `out` may be Encoded, see `encodings`."""
        raise NotImplementedError

    def buffers(self, keys: Sequence[Key]) -> list[Array]:
        """A flat buffer (elements,) for each key, from which pushes need no copy: shared with servers on this host. The
        caller may write to it, except between a push from it and the return of the key's next pull."""
        raise NotImplementedError

    def shares(self, array: Array) -> bool:
        """Whether the array of `buffers` is memory that servers on this host read."""
        return False

    def encodings(self, key: Key) -> Sequence[Encoding]:
        """For a caller that encodes what it pushes of a key, and pushes an Encoded each time: how each slice is
        encoded. It may pull such ones, too. Empty if the store has to do both, or if the key is not encoded."""
        return ()

    def pushpull(
        self, key: Keys, value: Any, out: Any = None, priority: int = 0, wait: bool = True, rate: float = -1.0
    ) -> Handle:
        """`push`, then `pull` into `out` (default: into `value`)."""
        self.push(key, value, priority, rate)
        return self.pull(key, value if out is None else out, priority, wait)

    def barrier(self) -> None:
        """Wait for all workers."""

    def confirm(self) -> None:
        """Call this before this worker replaces a file on behalf of all workers. In an elastic job it raises JobLost if
        this worker was suspended for so long that the others go on without it."""

    def repeat(self, block: Callable[[], T]) -> T:
        """Run `block`, which has operations with other workers, and return its result. In an elastic job the block runs
        again from its beginning after each change of the members. So its last statement must be such an operation, and
        the statements before that must not change what the block reads."""
        return self.ops.repeat(block)

    def complete(self) -> None:
        """Call this when all results of a round of training have arrived, before the first use of them. In an elastic
        job it raises ViewChanged if the round was aborted: then the results are void."""
        self.ops.complete()

    def enter(self) -> bool:
        """Call this after ViewChanged: go on as a member of the next view. Returns whether the others have completed
        the interrupted round: then its step is made already, and must not be made again. Raises MembershipEnded; and
        Stopped, once, when the job ends because it has too few workers."""
        return self.ops.enter()

    def all_reduce(self, name: str, array: Array) -> Array:
        """The elementwise sum of all workers' arrays (float64), in every type of store. Every worker must call it."""
        return np.array(array, np.float64)

    def init_gathered(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        """Declare keys for `gather`, with the float32 elements of each worker's part. Every worker must make the same
        call. Raises UserError for kvstores that are not synchronous."""
        raise NotImplementedError

    def gather(self, keys: Sequence[Key], parts: Sequence[Array], priority: int = 0) -> Handle:
        """Send this worker's parts (elements,) of gathered keys, and receive those of all workers: after `wait`, the
        handle's values are (workers, elements), valid until the key's next `gather`, before which `wait` must return.
        Every worker must call it."""
        raise NotImplementedError

    def broadcast(self, values: Array, needed: bool = True, source: int = 0) -> None:
        """Replace `values`, flat bytes (uint8), by those of worker `source`. Every worker must call it, with as many
        bytes. Without `needed` this worker's values stay."""

    def link_rate(self) -> float | None:
        """Bytes/s that this worker's host can send over the network, as `measure_limits` found: 0 if it uses none, None
        if nothing was measured."""
        return None

    def wire_ratio(self, elements: int) -> float:
        """Bytes of a float32 weight's pushes and results on the wire, over those without gradient compression."""
        return 1.0

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        """Run the optimizer in the store: {"name": "sgd", "lr": 0.1, "momentum": 0.9, ...}; JSON values only."""
        raise NotImplementedError

    def follow_changes(self, keys: Sequence[Key], refusal: Callable[[types.KVStoreType], str]) -> None:
        """The program calls `between_steps` after each step from now on, so the kvstore can change while it runs. All
        weights are these keys, and the optimizer runs in the store. `refusal`: why the program cannot go on with a
        type, or empty."""

    def between_steps(self, settle: Callable[[], None]) -> bool:
        """A step has been made: its pushes and pulls have been called. If the job's kvstore changes after it, call
        `settle`, which waits for the pulls, and change, on all workers at once. Returns whether it has changed. Raises
        JobLost."""
        return False

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        """How pushes and results of float32 weights are encoded: {"type": "none"}, or in distributed stores one of
        codec.TYPES with its parameter. Every worker must make the same call, before `init`."""
        kind = parameters.get("type", "none") if isinstance(parameters, dict) else parameters
        if kind != "none":
            raise UserError(f"gradient compression {kind!r} is not available; choose none")

    def new_name(self, what: str) -> str:
        """`what` with the number of this call. Workers that make the same calls get the same names."""
        self._names += 1
        return f"{what} {self._names}"

    def factor_to_mean(self, key: Key) -> float:
        """A pulled value times this factor is the mean of all workers' pushes, if no optimizer runs on the servers: 1
        if the value is the mean already (see `init`), 1 / workers if it is the sum."""
        return 1.0 / self.num_workers

    def key_number(self, key: Key) -> int:
        """The key's number in the "keys" of an optimizer's spec."""
        raise NotImplementedError

    def optimizer_states(self) -> list[bytearray]:
        """Each server's weights and optimizer state, as bytes."""
        raise NotImplementedError

    def load_optimizer_state_bytes(self, states: Sequence[bytes]) -> None:
        """Worker 0 sends the servers what `optimizer_states` returned; the others wait. Raises UserError, JobLost."""
        raise NotImplementedError

    def residuals(self) -> dict[str, Array]:
        """The residuals of gradient compression for a checkpoint, on worker 0: flat arrays by name. Every worker must
        call it, while no push is in progress. Empty if there are none."""
        return {}

    def load_residuals(self, residuals: dict[str, Array]) -> None:
        """Restore what `residuals` returned. Every worker must call it, after `init`. If the number of workers has
        changed, worker 0 gets the sum of their residuals. Raises UserError when they belong to another model."""

    def save_optimizer_states(self, path: str) -> None:
        """Write one file for each server, `path`.server-K, and remove those of servers that an earlier job had in
        addition. Each is written completely or not at all."""
        states = self.optimizer_states()
        for name, state in zip(_files_of_servers(path), states, strict=False):
            write_whole(name, state)
        for name in itertools.islice(_files_of_servers(path), len(states), None):
            if not name.exists():
                break
            name.unlink(missing_ok=True)  # another worker may have removed it

    def load_optimizer_states(self, path: str) -> None:
        """Worker 0 sends the servers what `save_optimizer_states` wrote, also in a job with more or fewer servers; the
        others wait."""
        names = _files_of_servers(path)
        first = next(names)  # whose absence is an error
        existing = [first, *itertools.takewhile(Path.exists, names)]
        self.load_optimizer_state_bytes([read_state(str(name)) for name in existing])

    def measure_limits(self) -> str:
        """Measure the bandwidth of the network and of this host's memory, once before training, for `bound`. Every
        worker must call it. Returns the result as text; "" where nothing is measured."""
        return ""

    def carried(self) -> Any:
        """The bytes that this worker's links have transferred so far, for `bound`; None before `measure_limits`."""

    def bound(self, carried: Any, took: float) -> float:
        """A lower bound, in seconds, on the time that this worker's host needs for its share of the bytes that all
        workers' links transferred in `took` seconds. `carried` is this worker's difference of two `carried()`. Every
        worker must call it."""
        return 0.0

    def abort(self, reason: str) -> None:
        """Report that this worker has failed. This ends the job; the message of each process has the `reason`."""

    def failed(self, error: BaseException) -> None:
        """This worker ends with an error. This aborts the job if it cannot go on without this worker."""
        self.abort(str(error) or type(error).__name__)

    def take_staleness(self) -> float | None:
        """Mean staleness since the last call: updates of a slice by other workers between this worker's pull and its
        push. None if it is not measured."""
        return 0.0

    def close(self) -> None:
        """Leave the job. It continues until every worker has closed its store."""


def keys_and_values(key: Keys, value: Any) -> tuple[list[Key], list[Any]]:
    """One key and its value, or lists of both, as lists. Raises UserError when the lengths differ."""
    if isinstance(key, (int, str)):
        return [key], [value]
    keys, values = list(key), list(value)
    if len(keys) != len(values):
        raise UserError(f"kvstore: {len(keys)} keys but {len(values)} values")
    return keys, values


def check_rate(rate: float) -> None:
    """Raises UserError unless the learning rate is finite."""
    if not math.isfinite(rate):
        raise UserError(f"kvstore: the learning rate is {rate}, expected a finite number")


def as_array(value: Any) -> Array:
    """A numpy view of an array or CPU tensor; a tensor on another device is copied."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach()
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        value = value.cpu()
    return np.asarray(value)


def summed(value: Any) -> Array:
    """The gradient as one flat, contiguous array of float32 or float64. A list or tuple, one value for each device, is
    summed."""
    if isinstance(value, (list, tuple)):
        total = as_array(value[0])
        if len(value) > 1:
            total = np.array(total)
            for other in value[1:]:
                total += as_array(other)
    else:
        total = as_array(value)
    if total.dtype not in FLOATS:
        raise UserError(f"kvstore: values must be float32 or float64, this one is {total.dtype.name}")
    return np.ascontiguousarray(total).reshape(-1)


def _files_of_servers(path: str) -> Iterator[Path]:
    """The files for server 0, 1, ..., without end."""
    return (Path(f"{path}.server-{number}") for number in itertools.count())
