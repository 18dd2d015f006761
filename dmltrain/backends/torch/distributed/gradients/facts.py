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

LARGEST = 1 << 16  # counts are compared modulo this, so that their squares are exact
OF_PARAMETER, EXTRA = 4, 7  # facts of each parameter, and numbers that are not of one


@dataclass
class Facts:
    """How many workers say so of each parameter, (parameters,) int64."""

    has: Array  # a gradient
    sparse: Array  # and it is sparse
    wants: Array  # it is trained
    again: Array  # the gradient has changed since it was sent
    at_step: int  # workers that are in step() or reduce_gradients(); the others are in backward()
    even: bool  # all have called backward() and zero_grad() equally often since the last round

    def is_sparse(self, number: int) -> bool:
        """Whether all gradients of this parameter are, if it has any."""
        return bool(self.sparse[number] == self.has[number])


@dataclass
class Place:
    """Where a worker is in its program. `calls` of backward() and zero_grad() since the last round."""

    steps: int
    layouts: int
    calls: int
    at_step: bool


class Exchange:
    """The facts of a round, of so many parameters."""

    def __init__(self, store: KVStore, name: str, parameters: int) -> None:
        self._store, self._parameters = store, parameters
        self._key = store.new_name(name)
        self._own: list[int] = []  # this worker's steps and layouts
        self._handle: Handle | None = None
        base = store.num_workers + 1
        self.has, self.sparse, self.wants, self.again = (base**power for power in range(OF_PARAMETER))
        store.init([self._key], [np.zeros(parameters + EXTRA)])

    def send(self, numbers: Sequence[int], place: Place, bucket: Bucket | None) -> Handle | None:
        """`numbers`: of each parameter the sum of `has`, `sparse`, `wants` and `again`, as far as they are true. Also
        sends a bucket, whose handle is returned."""
        steps, calls = place.steps % LARGEST, place.calls % LARGEST
        self._own = [steps, place.layouts]
        extra = (steps, steps**2, place.layouts, place.layouts**2, calls, calls**2, place.at_step)
        values = np.array([*numbers, *extra], np.float64)
        if bucket is None or bucket.device.type != "cpu":
            self._handle = self._store.pushpull(self._key, values, READ, wait=False)
            return bucket.send(self._store) if bucket else None
        self._handle = bucket.send_with(self._store, self._key, values)
        return self._handle

    def receive(self) -> Facts:
        """Raises UserError if another worker has made another number of steps, or has other parameters."""
        assert self._handle is not None  # `send` comes first
        self._handle.wait()
        sums, workers = self._handle.values[-1], self._store.num_workers
        steps, steps_squared, layouts, layouts_squared, calls, calls_squared, at_step = sums[
            self._parameters :
        ].tolist()
        if not _equal(steps, steps_squared, workers) or not _equal(layouts, layouts_squared, workers):
            same.refuse_out_of_step(self._store, self._own)
        packed, found = np.rint(sums[: self._parameters]).astype(np.int64), []
        for _ in range(OF_PARAMETER):
            packed, count = np.divmod(packed, workers + 1)
            found.append(count)
        has, sparse, wants, again = found
        return Facts(has, sparse, wants, again, round(at_step), _equal(calls, calls_squared, workers))


def _equal(total: float, squares: float, workers: int) -> bool:
    """Whether all workers have the same number, by the sum of theirs and that of the squares (Cauchy-Schwarz)."""
    return total**2 == workers * squares


class SparseRows:
    """The rows that the sparse gradients of parameters have on any worker: a sum of them has these, as in one
    process."""

    def __init__(self, store: KVStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._keys: dict[torch.nn.Parameter, str] = {}

    def gradient(self, parameter: torch.nn.Parameter, values: torch.Tensor, counts: bool) -> torch.Tensor:
        """`values` (rows, ...) as a sparse gradient with the rows of all workers' gradients. This worker's has rows
        only if it `counts`. Every worker must call this."""
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
