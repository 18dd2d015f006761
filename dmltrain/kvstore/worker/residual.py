"""The workers' residuals of gradient compression as flat arrays for a checkpoint: one for each worker, with all its
slices in order. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.worker.entry import Entry
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice


def slices_with_residual(entries: Iterable[Entry]) -> list[WorkerSlice]:
    """The slices that have a residual."""
    return [slice_ for entry in entries for slice_ in entry.slices if slice_.residual is not None]


def gathered(slices: Sequence[WorkerSlice]) -> Array:
    return np.concatenate([slice_.residual for slice_ in slices if slice_.residual is not None])


def add(slices: Sequence[WorkerSlice], values: Array) -> None:
    """Add another worker's residuals, which it has `gathered`, to the slices' own."""
    start = 0
    for slice_ in slices:
        assert slice_.residual is not None  # see slices_with_residual
        slice_.residual += values[start : start + slice_.range.length]
        start += slice_.range.length


def spread(
    slices: Sequence[WorkerSlice], workers: Sequence[Array], whose: Callable[[WorkerSlice], Iterable[int]]
) -> None:
    """Set the residual of each slice to the sum of the residuals of the workers `whose(slice)`. Raises UserError when
    they belong to another model."""
    if {array.size for array in workers} != {sum(slice_.range.length for slice_ in slices)}:
        raise UserError(
            "the residuals of gradient compression belong to another model or another compression: continue with the "
            "same --network and --gc-type, or with --gc-type none"
        )
    start = 0
    for slice_ in slices:
        stop = start + slice_.range.length
        assert slice_.residual is not None  # see slices_with_residual
        slice_.residual[:] = sum(workers[worker][start:stop] for worker in whose(slice_))
        start = stop
