"""The workers' residuals of gradient compression as flat arrays for a checkpoint: one a worker, of all its slices in
their order. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import UserError
from dmltrain.kvstore.worker.entry import Entry
from dmltrain.kvstore.worker.server_link import WorkerSlice


def slices_with_residual(entries: Iterable[Entry]) -> list[WorkerSlice]:
    """Those whose pushes leave a residual."""
    return [slice_ for entry in entries for slice_ in entry.slices if slice_.residual is not None]


def gathered(slices: Sequence[WorkerSlice]) -> Array:
    return np.concatenate([slice_.residual for slice_ in slices if slice_.residual is not None])


def spread(
    slices: Sequence[WorkerSlice], workers: Sequence[Array], whose: Callable[[WorkerSlice], Iterable[int]]
) -> None:
    """Give each slice the sum of the residuals of `whose` workers. Raises UserError when they are of another model."""
    if {array.size for array in workers} != {sum(slice_.range.length for slice_ in slices)}:
        raise UserError(
            "the residuals of gradient compression are of another model or compression: continue with the "
            "same --network and --gc-type, or with --gc-type none"
        )
    start = 0
    for slice_ in slices:
        stop = start + slice_.range.length
        assert slice_.residual is not None  # see slices_with_residual
        slice_.residual[:] = sum(workers[worker][start:stop] for worker in whose(slice_))
        start = stop
