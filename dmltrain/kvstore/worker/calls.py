"""The keys of one call, and which of them travel as a flat key.

A flat key consists of small keys of one type with one slice each, on one server, in the order of the call. Through
shared memory, where no bytes travel, it may be as large as the largest slice. Over TCP it is as large as a slice of one
key with all these elements would be, so that transfers and sums overlap. Only a call that is repeated, with the same
keys in the same order, has flat keys, and a key is in one flat key at most, so they take as much memory as their keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.encoded import Encoded
from dmltrain.kvstore.transport import flat
from dmltrain.kvstore.transport.outbox import Frame
from dmltrain.kvstore.worker.entry import KeyEntry
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links import sharding
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import FIRST, Parts, WorkerSlice

MAX_CALLS = 256  # that are remembered
MAX_FLAT = 1 << 16  # keys in flat keys


@dataclass(eq=False)
class Item:
    """What travels as one: a key of a call, or several in a flat key. `entry` has the slices that travel, `keys` are
    the entries of the keys, `positions` theirs in the call."""

    entry: KeyEntry
    keys: list[KeyEntry]
    positions: list[int]

    @property
    def is_flat(self) -> bool:
        return self.entry is not self.keys[0]

    @cached_property
    def places(self) -> dict[int, slice]:
        """Where the keys lie in the entry's elements, by position in the call."""
        places = flat.layout([key.size for key in self.keys], self.entry.dtype.itemsize)
        return dict(zip(self.positions, places, strict=True))

    def equally_far(self) -> bool:
        """Whether all keys have been pushed equally often, so they have one clock."""
        first = self.keys[0].clock
        return all([key.clock == first for key in self.keys])

    def data(self, arrays: Sequence[Array | Encoded]) -> tuple[Array | Encoded | Parts, int | None]:
        """What is pushed of a call's `arrays`, and its offset in this worker's arena, if known. Encoded keys are in no
        flat key."""
        if not self.is_flat:
            array = arrays[self.positions[0]]
            return array, self.entry.offset if array is self.entry.buffer else None
        parts = [array for position in self.positions if not isinstance(array := arrays[position], Encoded)]
        if all([part is key.buffer for part, key in zip(parts, self.keys, strict=True)]):
            self._join_buffers()
            if self.entry.buffer is not None:
                return self.entry.buffer, self.entry.offset
        return parts, None

    def _join_buffers(self) -> None:
        """If the keys' buffers are a flat key as they lie, they are its buffer."""
        first, entry = self.keys[0], self.entry
        if entry.buffer is not None or first.block is None:
            return
        start = first.place
        starts = [start + place.start for place in self.places.values()]
        if all([key.block is first.block for key in self.keys]) and starts == [key.place for key in self.keys]:
            entry.buffer = first.block[start : start + entry.size]
            entry.offset = first.offset


@dataclass(eq=False)
class Call:
    """The keys of one call."""

    names: tuple[Key, ...]
    entries: list[KeyEntry]
    repeated: bool = False
    _flat: list[Item] = field(default_factory=list)
    _alone: list[Item] = field(init=False)  # all keys, in their order
    _usual: list[Item] = field(init=False)  # if all flat keys can be used

    def __post_init__(self) -> None:
        self._alone = [Item(entry, [entry], [position]) for position, entry in enumerate(self.entries)]
        self._usual = self._alone

    def use(self, flat_keys: list[Item]) -> None:
        """From now on these keys travel together where possible."""
        self._flat, self._usual = flat_keys, self._with(flat_keys)

    def _with(self, flat_keys: list[Item]) -> list[Item]:
        together = {position for item in flat_keys for position in item.positions}
        return [*flat_keys, *(item for item in self._alone if item.positions[0] not in together)]

    def items(self, pulls: bool = False) -> list[Item]:
        """What travels now. `pulls`: without a push, so weights that were never pushed travel alone."""
        able = [
            item
            for item in self._flat
            if item.equally_far() and not (pulls and any([key.unpushed for key in item.keys]))
        ]
        return self._usual if len(able) == len(self._flat) else self._with(able)


def runs(positions: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """The positions in runs of at most `most` bytes and MAX_MEMBERS; larger ones are left out."""
    size = 0
    result: list[list[int]] = [[]]
    for position, nbytes in zip(positions, sizes, strict=True):
        if nbytes > most:
            continue
        if size + nbytes > most or len(result[-1]) == flat.MAX_MEMBERS:
            result.append([])
            size = 0
        result[-1].append(position)
        size += nbytes
    return result


def _kind(entry: KeyEntry) -> Hashable | None:
    """What keys of one flat key have in common; None for a key that travels alone."""
    if len(entry.ways) != 1 or not entry.is_weight or entry.pusher >= 0:
        return None
    link, slice_ = entry.ways[0]
    coded = slice_.codec is not None or slice_.result_codec is not None
    return None if coded or link.to_relay else (link, entry.dtype, entry.mean)


@dataclass(eq=False)
class Calls:
    """The calls so far. `flat_keys`: whether the kvstore can push several keys as one."""

    entries: KeyEntries
    flat_keys: bool
    _known: dict[tuple[Key, ...], Call] = field(default_factory=dict)
    _alone: dict[Key, Call] = field(default_factory=dict)  # of one key
    _flat: dict[int, Item] = field(default_factory=dict)  # by number
    _members: set[KeyEntry] = field(default_factory=set)  # of flat keys

    def find(self, names: Sequence[Key]) -> Call:
        """Raises UserError if a key was not declared."""
        if len(names) == 1:
            return self._alone.get(names[0]) or self._alone.setdefault(names[0], self._new(names))
        if not self.flat_keys:
            return self._new(names)
        call = self._known.get(tuple(names))
        if call is None:
            if len(self._known) == MAX_CALLS:
                self._known.clear()
            call = self._known[tuple(names)] = self._new(names)
        elif not call.repeated:
            call.repeated = True
            if len(set(names)) == len(names):
                call.use(self._divide(call.entries))
        return call

    def forget(self) -> None:
        """Find the keys of each call anew: some have been forgotten."""
        self._known.clear()
        self._alone.clear()

    def _new(self, names: Sequence[Key]) -> Call:
        return Call(tuple(names), [self.entries.find(name) for name in names])

    def _divide(self, entries: Sequence[KeyEntry]) -> list[Item]:
        """The flat keys of a call."""
        by_kind: dict[Hashable, list[int]] = {}
        for position, entry in enumerate(entries):
            if kind := _kind(entry):
                by_kind.setdefault(kind, []).append(position)
        found = []
        for positions in by_kind.values():
            sizes = [entries[position].ways[0].slice.nbytes for position in positions]
            shares = entries[positions[0]].ways[0].link.link.own_arena is not None
            most = sharding.MAX_BYTES if shares else sharding.slice_size(sum(sizes), 1, sharding.SLICES_PER_SERVER)
            for run in runs(positions, sizes, most):
                if len(run) > 1 and (item := self._of([entries[position] for position in run], run)):
                    found.append(item)
        return found

    def _of(self, keys: list[KeyEntry], positions: list[int]) -> Item | None:
        """The flat key of these keys, which is declared to the server if it is new; None if there cannot be one."""
        numbers = [key.number for key in keys]
        number = flat.number(numbers)
        known = self._flat.get(number)
        if known:
            return replace(known, positions=positions) if known.keys == keys else None
        if not self._members.isdisjoint(keys) or len(self._members) + len(keys) > MAX_FLAT:
            return None
        self._members.update(keys)
        keys[0].ways[0].link.outbox.put_all([Frame(flat.declaration(numbers), None, FIRST)])
        self._flat[number] = Item(_flat_entry(number, keys), keys, positions)
        return self._flat[number]


def _flat_entry(number: int, keys: Sequence[KeyEntry]) -> KeyEntry:
    first, (link, slice_) = keys[0], keys[0].ways[0]
    size = flat.layout([key.size for key in keys], first.dtype.itemsize)[-1].stop
    whole = WorkerSlice(sharding.Slice(number, 0, 0, size, slice_.range.server), first.dtype, None, None)
    return KeyEntry(number, size, first.dtype, [whole], [Way(link, whole)], first.compression, True, first.mean)
