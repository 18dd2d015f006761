"""Shared memory of slices that a server has forgotten, for others. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.slice import Allocate, Buffer


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
