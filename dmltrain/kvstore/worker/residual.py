"""The workers' residuals of gradient compression as flat arrays: one for each worker, with all its slices in order. A
checkpoint has them, and a worker that leaves an elastic job hands its own over to one that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.encoded import Residual
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.broadcast import Broadcast
from dmltrain.kvstore.worker.entry import KeyEntry
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice


def slices_with_residual(entries: Iterable[KeyEntry]) -> list[WorkerSlice]:
    """The slices that have a residual."""
    return [slice_ for entry in entries for slice_ in entry.slices if slice_.residual is not None]


def _of(slice_: WorkerSlice) -> Residual:
    assert slice_.residual is not None  # see slices_with_residual
    return slice_.residual


def gathered(slices: Sequence[WorkerSlice]) -> Array:
    return np.concatenate([_of(slice_).read() for slice_ in slices])


def add(slices: Sequence[WorkerSlice], values: Array) -> None:
    """Add another worker's residuals, which it has `gathered`, to the slices' own."""
    start = 0
    for slice_ in slices:
        own = _of(slice_)
        own.write(own.read() + values[start : start + slice_.range.length])
        start += slice_.range.length


def spread(
    slices: Sequence[WorkerSlice], workers: Sequence[Array], owners: Callable[[WorkerSlice], Iterable[int]]
) -> None:
    """Set the residual of each slice to the sum of the residuals of the workers `owners(slice)`. Raises UserError when
    they belong to another model."""
    if {array.size for array in workers} != {sum(slice_.range.length for slice_ in slices)}:
        raise UserError(
            "the residuals of gradient compression belong to another model or another compression: continue with the "
            "same --network and --gc-type, or with --gc-type none"
        )
    start = 0
    for slice_ in slices:
        stop = start + slice_.range.length
        zeros = np.zeros(slice_.range.length, np.float32)
        _of(slice_).write(sum((workers[worker][start:stop] for worker in owners(slice_)), zeros))
        start = stop


class ResidualHandover:
    """The residuals of workers that leave an elastic job on purpose go to one that stays, in the first op of a view.

    They go through the servers unchanged, one worker after the other. No member changes its own residuals before the op
    is recognised. So if the op is aborted, the members that are left can repeat it in the next view.
    """

    def __init__(self, member: int, entries: KeyEntries, broadcast: Broadcast) -> None:
        self._member, self._entries, self._broadcast = member, entries, broadcast

    def exchange(self, view: View) -> list[Array]:
        """All members must call this. Returns, on the receiver, the residuals of each member that hands over; on the
        others nothing. Raises ViewChanged, JobLost."""
        slices = slices_with_residual(self._entries)
        is_receiver, taken = self._member == view.receiver, []
        for member in view.hands_over if slices else ():
            size = sum(slice_.range.length for slice_ in slices)
            values = gathered(slices) if member == self._member else np.zeros(size, np.float32)
            self._broadcast(values.view(np.uint8), is_receiver, member)
            taken += [values] if is_receiver else []
        return taken

    def settle(self, view: View, taken: list[Array]) -> None:
        """Call this when the op is recognised. `taken`: the result of `exchange`."""
        slices = slices_with_residual(self._entries)
        if self._member in view.hands_over:
            for undo in self._entries.undos:
                undo.forget()
        for values in taken:
            add(slices, values)
