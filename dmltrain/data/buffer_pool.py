"""Arrays for batches of images, used again as soon as nobody holds them.

A batch of 128 images of 224x224 pixels has 19 MB. Fresh memory for each would be cleared and mapped by the kernel page
by page. An array is free when nothing refers to it any more: neither a batch, nor a view of it, nor a framework's
tensor that shares its memory. So a consumer may keep a batch as long as it likes; another array is made then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from dmltrain.base.arrays import Array


class Rooms:
    """Arrays of one kind: `make()` returns a new one, or a view of one. For one thread."""

    def __init__(self, make: Callable[[], Array]) -> None:
        self._make = make
        self._made: list[tuple[Array, int]] = []  # a view of each, and the references to its memory when it is free

    def take(self) -> Array:
        """A free array."""
        for view, free in self._made:
            if _references(view) == free:
                return view[:]
        view = self._make()[:]
        self._made.append((view, _references(view)))
        return view[:]

    def __len__(self) -> int:
        """How many have been made."""
        return len(self._made)


def _references(view: Array) -> int:
    """To the array that owns the memory: every view of it refers to it."""
    return sys.getrefcount(view.base)
