"""What the workers tell one another at the end of each round of gradients (reducer.py): small numbers, in one sum; and,
where gradients are sparse, which rows they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dmltrain.backends.torch.distributed import same
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import READ, Handle, KVStore

LARGEST = 1 << 16  # counts are compared modulo this, so that a float64 holds the sum of their squares exactly
OF_PARAMETER, EXTRA = 4, 7  # facts of each parameter; further numbers, which belong to no parameter


@dataclass
class RoundFacts:
    """The arrays count, for each parameter, the workers for which something holds: (parameters,) int64."""

    has: Array  # the parameter has a gradient there
    sparse: Array  # its gradient there is sparse
    trained: Array  # it is trained there (requires_grad)
    changed: Array  # its gradient there has changed after it was sent
    at_step: int  # workers that are in step() or reduce_gradients(); the others are in backward()
    even: bool  # all have called backward() and zero_grad() equally often since the last round

    def is_sparse(self, number: int) -> bool:
        """Whether all gradients that workers have of this parameter are sparse."""
        return bool(self.sparse[number] == self.has[number])


@dataclass
class ProgramPlace:
    """Where a worker is in its program. `calls` of backward() and zero_grad() since the last round."""

    steps: int
    layouts: int
    calls: int
    at_step: bool


class FactsExchange:
    """Exchanges the facts of a round, for a fixed number of parameters."""

    def __init__(self, store: KVStore, name: str, parameters: int) -> None:
        self._store, self._parameters = store, parameters
        self._key = store.new_name(name)
        self._own: list[int] = []  # this worker's steps and layouts
        self._handle: Handle | None = None
        # Four counts travel in one number, as digits in base workers + 1, so a sum over all workers has no carry. A
        # float64 holds four digits exactly for up to 9,740 workers (base^4 < 2^53).
        base = store.num_workers + 1
        self.has, self.sparse, self.trained, self.changed = (base**power for power in range(OF_PARAMETER))
        store.init([self._key], [np.zeros(parameters + EXTRA)])

    def send(self, numbers: Sequence[int], place: ProgramPlace, bucket: Bucket | None) -> Handle | None:
        """Send this worker's facts. `numbers`: for each parameter the sum of those of `has`, `sparse`, `trained` and
        `changed` that are true. Also sends the bucket, of a CPU, if there is one, and returns the bucket's handle."""
        steps, calls = place.steps % LARGEST, place.calls % LARGEST
        self._own = [steps, place.layouts]
        extra = (steps, steps**2, place.layouts, place.layouts**2, calls, calls**2, place.at_step)
        values = np.array([*numbers, *extra], np.float64)
        if bucket is None:
            self._handle = self._store.pushpull(self._key, values, READ, wait=False)
            return None
        pushed = [bucket.host_gradients(), values]
        self._handle = self._store.pushpull([bucket.name, self._key], pushed, READ, bucket.priority, wait=False)
        return self._handle

    def receive(self) -> RoundFacts:
        """Raises UserError if another worker has made another number of steps, or has other parameters."""
        assert self._handle is not None  # `send` comes first
        self._handle.wait()
        sums, workers = self._handle.values[-1], self._store.num_workers
        steps, steps_squared, layouts, layouts_squared, calls, calls_squared, at_step = sums[
            self._parameters :
        ].tolist()
        if not _equal(steps, steps_squared, workers) or not _equal(layouts, layouts_squared, workers):
            same.refuse_out_of_step(self._store, self._own)
        packed, counts = np.rint(sums[: self._parameters]).astype(np.int64), []
        for _ in range(OF_PARAMETER):
            packed, count = np.divmod(packed, workers + 1)
            counts.append(count)
        has, sparse, trained, changed = counts
        return RoundFacts(has, sparse, trained, changed, round(at_step), _equal(calls, calls_squared, workers))


def _equal(total: float, squares: float, workers: int) -> bool:
    """Whether all workers have the same number, given the sum of their numbers and the sum of the squares: by the
    Cauchy-Schwarz inequality total^2 = workers x squares holds only for equal numbers."""
    return total**2 == workers * squares


class SparseRows:
    """The rows that the sparse gradients of parameters have on any worker: a sum of them has these, as in one
    process."""

    def __init__(self, store: KVStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._keys: dict[torch.nn.Parameter, str] = {}

    def gradient(self, parameter: torch.nn.Parameter, values: torch.Tensor, counts: bool) -> torch.Tensor:
        """`values` (rows, ...), the dense result, as a sparse gradient: it has each row that any worker's gradient has.
        `counts`: whether this worker's gradient counts; else its rows are left out. Every worker must call this."""
        key = self._keys.get(parameter)
        if key is None:
            key = self._keys[parameter] = self._store.new_name(f"{self._prefix} rows")
            self._store.init([key], [np.zeros(len(parameter))])
        own = np.zeros(len(parameter))
        if parameter.grad is not None and counts:
            own[rows_of(parameter.grad).cpu().numpy()] = 1.0
        handle = self._store.pushpull(key, own, READ, wait=False)
        handle.wait()
        rows = torch.from_numpy(np.flatnonzero(handle.values[0])).to(parameter.device)
        chosen = values.index_select(0, rows).to(parameter.dtype)
        return torch.sparse_coo_tensor(rows[None], chosen, parameter.shape, is_coalesced=True, check_invariants=False)


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """The rows that a sparse gradient has, (rows,)."""
    return gradient.coalesce().indices()[0]
