"""The residuals of workers that leave an elastic job on purpose go to one that stays, in the first op of a view.

They go through the servers as they are, one worker's after the other's. Nobody changes its own before the op is
recognised: if it is aborted, it is made again in the next view by those who are left.
"""

from __future__ import annotations

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.broadcast import Broadcast
from dmltrain.kvstore.worker.keys import Entries


class HandingOver:
    """Of one member."""

    def __init__(self, member: int, entries: Entries, broadcast: Broadcast) -> None:
        self._member, self._entries, self._broadcast = member, entries, broadcast

    def exchange(self, view: View) -> list[Array]:
        """All members call this. Returns on the receiver the residuals of each that hands over, else nothing. Raises
        ViewChanged, JobLost."""
        slices = residual.slices_with_residual(self._entries)
        is_receiver, taken = self._member == view.receiver, []
        for member in view.hands_over if slices else ():
            size = sum(slice_.range.length for slice_ in slices)
            values = residual.gathered(slices) if member == self._member else np.zeros(size, np.float32)
            self._broadcast(values.view(np.uint8), is_receiver, member)
            taken += [values] if is_receiver else []
        return taken

    def settle(self, view: View, taken: list[Array]) -> None:
        """The op is recognised; `taken`: what `exchange` returned."""
        slices = residual.slices_with_residual(self._entries)
        if self._member in view.hands_over:
            for undo in self._entries.undos:
                undo.forget()
        for values in taken:
            residual.add(slices, values)
