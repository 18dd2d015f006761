"""Values that are read in place, where the server wrote them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.worker.entry import KeptSlice, KeyEntry, cut, memory_of
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice


def read_only(array: Array) -> Array:
    """A view that nobody can write through."""
    view = array.view()
    view.flags.writeable = False
    return view


def joined(kept: list[tuple[Array, int] | None], entry: KeyEntry, ways: list[Way]) -> Array:
    """One read-only array of a key's slices. `kept` has (value, offset) of each slice that arrived through shared
    memory. The array is a view if all slices are contiguous in one process's memory; else they are copied."""
    first, size = kept[0], entry.dtype.itemsize
    starts = {
        (id(way.link), slot and slot[1] - way.slice.range.start * size) for way, slot in zip(ways, kept, strict=True)
    }
    if len(starts) == 1 and first is not None:
        arena = ways[0].link.link.peer_arena
        assert arena is not None  # the slices lie there
        return arena.view(first[1], entry.size * size).view(entry.dtype)
    destination = memory_of(entry)
    for slot, way in zip(kept, ways, strict=True):
        if slot is not None:
            np.copyto(cut(destination, way.slice), slot[0])
    return read_only(destination)


@dataclass(eq=False, slots=True)
class Reading:
    """A pull of one key, or flat key, whose values are read in place, where the server wrote them."""

    entry: KeyEntry
    ways: list[Way]
    handle: Handle
    places: dict[int, slice]  # of the key's elements, by position among the handle's values; several for a flat key
    slots: list[tuple[Array, int] | None]  # value and offset of each slice

    def keep(self, slice_: WorkerSlice, value: Array, offset: int) -> None:
        """Record the value of a slice that has arrived."""
        self.slots[slice_.range.index] = value, offset
        self.entry.kept.append(KeptSlice(self.ways[slice_.range.index], offset))

    def finish(self) -> None:
        """All slices have arrived: set the handle's values."""
        value = joined(self.slots, self.entry, self.ways)
        for position, place in self.places.items():
            self.handle.values[position] = value[place]
