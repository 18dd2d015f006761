"""Takes back the change of a residual by a round that a change of view aborts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.encoded import Residual


@dataclass(eq=False, slots=True)
class HostResidual:
    """Of pushes that the store encodes: see kvstore.encoded.Residual."""

    values: Array
    _kept: Array | None = None

    def read(self) -> Array:
        return self.values

    def write(self, values: Array) -> None:
        self.values[:] = values

    def keep(self) -> None:
        if self._kept is None:
            self._kept = np.empty_like(self.values)
        np.copyto(self._kept, self.values)

    def restore(self) -> None:
        assert self._kept is not None
        np.copyto(self.values, self._kept)


@dataclass(eq=False, slots=True)
class Undo:
    """For the `residual` of one slice."""

    residual: Residual
    _op: int = 0  # whose round was encoded last

    def keep(self, op: int) -> None:
        """Remember the residual: the push of this op is encoded next."""
        if op > self._op:
            self.residual.keep()
            self._op = op

    def back_to(self, base: int) -> None:
        """A view begins after op `base`. If the last encoded push was of a later op, that op was aborted, and its push
        will be encoded again: restore the residual."""
        if self._op > base:
            self.residual.restore()
            self._op = base

    def forget(self) -> None:
        """Begin with a residual of zero."""
        self.residual.write(np.zeros(1, np.float32))
        self._op = 0
