"""Takes back the change of a residual by a round that a change of view aborts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array


@dataclass(eq=False, slots=True)
class Undo:
    """For the `residual` of one slice, float32 (length,)."""

    residual: Array
    _before: Array = field(init=False)  # what it was before the round of `_op` was encoded
    _op: int = 0

    def __post_init__(self) -> None:
        self._before = np.zeros_like(self.residual)

    def keep(self, op: int) -> None:
        """Remember the residual: the push of this op is encoded next."""
        if op > self._op:
            np.copyto(self._before, self.residual)
            self._op = op

    def back_to(self, base: int) -> None:
        """A view begins after op `base`. If the last encoded push was of a later op, that op was aborted, and its push
        will be encoded again: restore the residual."""
        if self._op > base:
            np.copyto(self.residual, self._before)
            self._op = base

    def forget(self) -> None:
        """Begin with a residual of zero."""
        self.residual[:] = 0
        self._op = 0
