"""Values that are read in place, where the server wrote them: those of single keys, and those of groups of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.worker.entry import KeptSlice, KeyEntry, cut, memory_of
from dmltrain.kvstore.worker.links.link_groups import GroupDestination, WorkerGroup
from dmltrain.kvstore.worker.links.outgoing import Outgoing
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import Destination, WorkerSlice


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
    """A pull of one key whose values are read in place, where the server wrote them."""

    entry: KeyEntry
    ways: list[Way]
    handle: Handle
    position: int  # among the handle's values
    slots: list[tuple[Array, int] | None]  # value and offset of each slice

    def keep(self, slice_: WorkerSlice, value: Array, offset: int) -> None:
        """Record the value of a slice that has arrived."""
        self.slots[slice_.range.index] = value, offset
        self.entry.kept.append(KeptSlice(self.ways[slice_.range.index], offset))

    def finish(self) -> None:
        """All slices have arrived: set the handle's value."""
        self.handle.values[self.position] = joined(self.slots, self.entry, self.ways)


@dataclass(eq=False, slots=True)
class KeptGroup:
    """A group's value, by its number; `keys` of its keys still need it."""

    link: ServerLink
    group: WorkerGroup
    number: int
    keys: int

    def let_go(self, outgoing: Outgoing) -> None:
        """One key fewer reads this value. The last one releases it."""
        self.keys -= 1
        if not self.keys:
            outgoing.add_read_together(self.link, (self.group, self.number))


@dataclass(eq=False)
class GroupReading(GroupDestination):
    """A pull with READ: `positions` are those of the keys `entries` among the handle's values."""

    link: ServerLink = field(kw_only=True)
    entries: Sequence[KeyEntry] = field(kw_only=True)
    positions: Sequence[int] = field(kw_only=True)

    def targets(self) -> list[Array]:
        return [memory_of(entry) for entry in self.entries]

    def read(self, values: list[Array], number: int) -> bool:
        kept, results = KeptGroup(self.link, self.group, number, len(self.entries)), self.handle.values
        for entry, position, value in zip(self.entries, self.positions, values, strict=True):
            results[position] = value
            entry.kept.append(kept)
        return True

    def received(self) -> None:
        for entry, position in zip(self.entries, self.positions, strict=True):
            self.handle.values[position] = read_only(memory_of(entry))

    def alone(self, place: int) -> Destination:
        entry = self.entries[place]
        reading = Reading(entry, entry.ways, self.handle, self.positions[place], [None])
        self.handle.then(reading.finish)
        target = memory_of(entry)
        return Destination(self.group.slices[place], target, self.handle, reading.keep, self.asked, self.handled)
