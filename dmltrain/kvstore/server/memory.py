"""Memory of a server: buffers for values and pushes. Buffers of forgotten slices are used again for others. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.base.arrays import Array

if TYPE_CHECKING:
    from dmltrain.kvstore.server.slice import ServerSlice

Allocate = Callable[[int], tuple[int | None, Array]]  # bytes -> offset if shared, memory (bytes,) uint8


def private(size: int) -> tuple[int | None, Array]:
    """Memory that is not shared with other processes."""
    return None, np.empty(size, np.uint8)


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one `kind`: "value" (also of a push, which can become the value), "push" (encoded), "coded" (an encoded
    value), "lent" (a push in the worker's shared memory), "completing" (a push in the memory of the receiving thread,
    which adds it before it receives the next), or "received" and "gathered" (a push and a value of a flat slice that is
    apart, used once)."""

    array: Array  # (length,) of the slice's type, or uint8 when encoded
    kind: str
    offset: int | None = None  # in the memory that this server shares
    readers: int = 0  # replies that are being sent or read from it
    of: ServerSlice | None = None  # whose memory it is

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def give_back(self) -> None:
        """Nobody needs what was received here. Its slice may have been forgotten since."""
        if self.of:
            self.of.give_back(self)

    def views(self) -> list[memoryview]:
        """The bytes to send over a link."""
        return [memoryview(self.array).cast("B")] if self.array.size else []  # type: ignore[arg-type]


@dataclass(eq=False)
class Memory:
    """Allocates for slices. An arena (shared_memory.py) frees nothing, so what slices return is used first, for others
    of the same size: from the lowest offset, so that the slices of a key are contiguous again."""

    allocate: Allocate
    _free: dict[int, list[tuple[int, Array]]] = field(default_factory=lambda: defaultdict(list))  # by bytes; heaps

    def take(self, size: int) -> tuple[int | None, Array]:
        """The offset if it is shared, and memory (size,) uint8 of any content."""
        free = self._free.get(size)
        return heapq.heappop(free) if free else self.allocate(size)

    def give_back(self, buffer: Buffer) -> None:
        """A buffer that nobody uses any more. Only shared memory is kept."""
        if buffer.offset is not None and buffer.nbytes:
            heapq.heappush(self._free[buffer.nbytes], (buffer.offset, buffer.array.view(np.uint8)))
