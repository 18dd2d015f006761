"""The workers' residuals of gradient compression as flat arrays for a checkpoint: one a worker, of all its slices in
their order. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import UserError
from dmltrain.kvstore.worker.entry import Entry
from dmltrain.kvstore.worker.server_link import Part


def parts_of(entries: Iterable[Entry]) -> list[Part]:
    """Those whose pushes leave a residual."""
    return [part for entry in entries for part in entry.parts if part.residual is not None]


def gathered(parts: Sequence[Part]) -> Array:
    return np.concatenate([part.residual for part in parts if part.residual is not None])


def spread(parts: Sequence[Part], workers: Sequence[Array], whose: Callable[[Part], Iterable[int]]) -> None:
    """Give each part the sum of the residuals of `whose` workers. Raises UserError when they are of another model."""
    if {array.size for array in workers} != {sum(part.piece.length for part in parts)}:
        raise UserError(
            "the residuals of gradient compression are of another model or compression: continue with the "
            "same --network and --gc-type, or with --gc-type none"
        )
    start = 0
    for part in parts:
        stop = start + part.piece.length
        assert part.residual is not None  # see parts_of
        part.residual[:] = sum(workers[worker][start:stop] for worker in whose(part))
        start = stop
