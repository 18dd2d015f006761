"""The keys of one call, and which of them travel in groups.

A group consists of keys with one slice each, in the order of the call. Through shared memory, where no bytes travel, a
group may be as large as the largest slice. Over TCP it is as large as a slice of one key with all these elements would
be, so that transfers and sums overlap. Only a call that is repeated, with the same keys in the same order, has groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dmltrain.kvstore.base import Key
from dmltrain.kvstore.transport.wire import MAX_MEMBERS
from dmltrain.kvstore.worker.entry import KeyEntry
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links import sharding
from dmltrain.kvstore.worker.links.link_groups import WorkerGroup
from dmltrain.kvstore.worker.links.server_link import ServerLink

MAX_CALLS = 256  # that are remembered
MAX_CHANGES = 8  # of the differences of a group's clocks, before its keys travel alone for good


@dataclass(eq=False)
class GroupedKeys:
    """Keys of one call that travel in a group, and their positions in the call."""

    link: ServerLink
    entries: list[KeyEntry]
    positions: list[int]
    places: bytes = b""  # of the entries' buffers in this worker's arena, as they are sent
    _group: WorkerGroup | None = None
    _changes: int = 0

    def group(self) -> WorkerGroup | None:
        """The group for the keys' present clocks; None if the keys have to travel alone."""
        first = self.entries[0].clock
        differences = tuple([entry.clock - first for entry in self.entries])
        group = self._group
        if (group is None or group.differences != differences) and self._changes < MAX_CHANGES:
            self._changes += 1
            self._group = group = self.link.groups.find([entry.ways[0].slice for entry in self.entries], differences)
        return group if group is not None and group.differences == differences else None


@dataclass(eq=False)
class Call:
    """The keys of one call."""

    names: tuple[Key, ...]
    entries: list[KeyEntry]
    grouped: list[GroupedKeys] = field(default_factory=list)
    alone: list[int] = field(init=False)  # positions of the other keys
    slices: int = field(init=False)
    repeated: bool = False

    def __post_init__(self) -> None:
        self.alone = list(range(len(self.entries)))
        self.slices = sum(len(entry.slices) for entry in self.entries)

    def divide(self) -> None:
        """Find the keys that can travel in groups."""
        by_link: dict[ServerLink, list[int]] = {}
        for position, entry in enumerate(self.entries):
            if _can_share(entry):
                by_link.setdefault(entry.ways[0].link, []).append(position)
        for link, positions in by_link.items():
            sizes = [self.entries[position].ways[0].slice.nbytes for position in positions]
            small = sharding.slice_size(sum(sizes), 1, sharding.SLICES_PER_SERVER)
            most = sharding.MAX_BYTES if link.link.own_arena else small
            for run in runs(positions, sizes, most):
                if len(run) > 1:
                    self.grouped.append(GroupedKeys(link, [self.entries[position] for position in run], run))
        shared = {position for group in self.grouped for position in group.positions}
        self.alone = [position for position in range(len(self.entries)) if position not in shared]


def runs(positions: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """The positions in runs of at most `most` bytes and MAX_MEMBERS; larger ones are left out."""
    size = 0
    result: list[list[int]] = [[]]
    for position, nbytes in zip(positions, sizes, strict=True):
        if nbytes > most:
            continue
        if size + nbytes > most or len(result[-1]) == MAX_MEMBERS:
            result.append([])
            size = 0
        result[-1].append(position)
        size += nbytes
    return result


def _can_share(entry: KeyEntry) -> bool:
    if len(entry.ways) != 1 or not entry.is_weight or entry.pusher >= 0:
        return False
    link, slice_ = entry.ways[0]
    return slice_.codec is None and slice_.result_codec is None and not link.to_relay


@dataclass(eq=False)
class Calls:
    """The calls so far. `groups`: whether the kvstore can push keys in groups."""

    entries: KeyEntries
    groups: bool
    _known: dict[tuple[Key, ...], Call] = field(default_factory=dict)
    _alone: dict[Key, Call] = field(default_factory=dict)  # of one key

    def find(self, names: Sequence[Key]) -> Call:
        """Raises UserError if a key was not declared."""
        if len(names) == 1:
            return self._alone.get(names[0]) or self._alone.setdefault(names[0], self._new(names))
        if not self.groups:
            return self._new(names)
        call = self._known.get(tuple(names))
        if call is None:
            if len(self._known) == MAX_CALLS:
                self._known.clear()
            call = self._known[tuple(names)] = self._new(names)
        elif not call.repeated:
            call.repeated = True
            if len(set(names)) == len(names):
                call.divide()
        return call

    def forget(self) -> None:
        """Find the keys of each call anew: some have been forgotten."""
        self._known.clear()
        self._alone.clear()

    def _new(self, names: Sequence[Key]) -> Call:
        return Call(tuple(names), [self.entries.find(name) for name in names])
