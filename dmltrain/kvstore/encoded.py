"""Keys whose pushes the caller encodes, and whose values it decodes, where its gradients are, as on a GPU: only the
bytes come to the store, and from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec import Codec


class Residual(Protocol):
    """The residual of one slice, (length,) float32, where pushes are encoded."""

    def read(self) -> Array:
        """For reading, until the next push."""

    def write(self, values: Array) -> None:
        """Replace it by values (length,), or one value for all (1,)."""

    def keep(self) -> None:
        """The next encoding may be taken back."""

    def restore(self) -> None:
        """Go back to what it was at the last `keep`."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """How a slice of a key is encoded: its elements from `start` on, apart from all others. `memory`: uint8
    (codec.nbytes(length),), which the slice's server reads; None if it is on another host. `keep_residual`: the caller
    calls this once, with a residual of zeros, if the codec needs one. `begin`: it calls this before each encoding;
    `take_back`: and this before one that takes the place of the last one, which it has not pushed."""

    start: int
    length: int
    codec: Codec
    memory: Array | None
    keep_residual: Callable[[Residual], None]
    begin: Callable[[], None] = lambda: None
    take_back: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.codec.nbytes(self.length)


@dataclass(frozen=True, eq=False)
class Encoded:
    """In place of an array to push or to pull into: of each slice, in the order of `KVStore.encodings`, the bytes to
    push, uint8, or an AsSent."""

    parts: Sequence[Any]


@dataclass(eq=False)
class AsSent:
    """A slice's value as its server has sent it, at the beginning of `memory`, uint8, which has room for it encoded and
    not. `codec` comes with the value: how it is encoded; None: it is not."""

    memory: Array
    codec: Codec | None = None
