"""The values of a group that are read in place, where the server wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dmltrain.base.arrays import Array
from dmltrain.kvstore.worker.entry import Entry, Reading, memory_of, read_only
from dmltrain.kvstore.worker.links.link_groups import GroupLanding, WorkerGroup
from dmltrain.kvstore.worker.links.outgoing import Outgoing
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import Landing


@dataclass(eq=False, slots=True)
class KeptGroup:
    """A group's value, by its number; `keys` of its keys still need it."""

    link: ServerLink
    group: WorkerGroup
    number: int
    keys: int

    def let_go(self, outgoing: Outgoing) -> None:
        """One key less."""
        self.keys -= 1
        if not self.keys:
            outgoing.add_read_together(self.link, (self.group, self.number))


@dataclass(eq=False)
class GroupReading(GroupLanding):
    """A pull with READ: `positions` are those of the keys `entries` among the handle's values."""

    link: ServerLink = field(kw_only=True)
    entries: Sequence[Entry] = field(kw_only=True)
    positions: Sequence[int] = field(kw_only=True)

    def targets(self) -> list[Array]:
        return [memory_of(entry) for entry in self.entries]

    def read(self, values: list[Array], number: int) -> bool:
        kept, found = KeptGroup(self.link, self.group, number, len(self.entries)), self.handle.values
        for entry, position, value in zip(self.entries, self.positions, values, strict=True):
            found[position] = value
            entry.kept.append(kept)
        return True

    def received(self) -> None:
        for entry, position in zip(self.entries, self.positions, strict=True):
            self.handle.values[position] = read_only(memory_of(entry))

    def alone(self, place: int) -> Landing:
        entry = self.entries[place]
        reading = Reading(entry, entry.ways, self.handle, self.positions[place], [None])
        self.handle.then(reading.finish)
        target = memory_of(entry)
        return Landing(self.group.slices[place], target, self.handle, reading.keep, self.asked, self.handled)
