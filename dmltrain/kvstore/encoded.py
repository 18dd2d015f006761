"""Pushes that the caller encodes where its gradients are, as on a GPU: only the bytes come to the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec import Codec


class Residual(Protocol):
    """The residual of one slice, (length,) float32, where the caller keeps it."""

    def read(self) -> Array:
        """A copy."""

    def write(self, values: Array) -> None:
        """Replace it."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """How a slice of a key is encoded: its elements from `start` on, apart from all others. `memory`: uint8
    (codec.nbytes(length),), which the slice's server reads; None if it is on another host. `keep_residual`: the caller
    calls this once, with a residual of zeros, if the codec needs one."""

    start: int
    length: int
    codec: Codec
    memory: Array | None
    keep_residual: Callable[[Residual], None]

    @property
    def nbytes(self) -> int:
        return self.codec.nbytes(self.length)


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded gradient to push: the bytes of each slice, uint8, in the order of `KVStore.encodings`."""

    parts: Sequence[Array]
