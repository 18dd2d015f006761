"""The flat slices of a server, by number. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dmltrain.kvstore.server.declared import MAX_SLICES, Declared, Rejected
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.gathering import Gatherings
from dmltrain.kvstore.server.memory import Memory
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.transport import flat


@dataclass(eq=False)
class Flats:
    """`slices`: those of all keys."""

    slices: Mapping[tuple[int, int], ServerSlice]
    declared: Declared
    memory: Memory
    gatherings: Gatherings = field(default_factory=Gatherings)
    _by_number: dict[int, FlatSlice] = field(default_factory=dict)
    _together: set[FlatSlice] = field(default_factory=set)
    _members: Counter[int] = field(default_factory=Counter)  # of the flat slices that each worker was the first to name

    def find(self, number: int) -> FlatSlice | None:
        return self._by_number.get(number)

    @property
    def together(self) -> list[FlatSlice]:
        """Those that have their members' state."""
        return list(self._together)

    def declare(self, worker: int, number: int, keys: Sequence[int]) -> None:
        """`number` is the flat slice of these keys, which have one slice each. Raises Rejected."""
        ids = [(key, 0) for key in keys]
        known = self.find(number)
        if number != flat.number(keys) or (known and known.ids != ids):
            raise Rejected(f"worker {worker} declares a flat key of {len(keys)} keys with the number of others")
        if known:
            return
        members = [self.slices[id] for id in ids if id in self.slices]
        if len(members) < len(ids) or len(set(ids)) < len(ids):
            raise Rejected(f"worker {worker} declares a flat key with unknown keys, or with one of them twice")
        kinds = {(member.dtype, member.factor) for member in members}
        if len(kinds) > 1 or any(member.codec or member.pushes.at_once or not member.is_weight for member in members):
            raise Rejected(f"worker {worker} declares a flat key with keys that cannot be in one")
        self._members[worker] += len(ids)  # for each worker: several may push the same keys in orders of their own
        if self._members[worker] > MAX_SLICES:
            raise Rejected(f"worker {worker} declares more than {MAX_SLICES} slices in flat keys")
        self._by_number[number] = FlatSlice(number, ids, members, self.memory)

    def begin(self, slice_: FlatSlice) -> None:
        """The flat slice gets its members' state, if that is possible and there is memory for it."""
        if not slice_.can_begin():
            return
        used = sum(each.push_bytes for each in self._together)
        if self.declared.has_room(used + slice_.push_bytes):
            slice_.begin()
            self._together.add(slice_)

    def end(self, slice_: FlatSlice) -> None:
        """Its members get their state back. It has no work."""
        slice_.end()
        self._together.remove(slice_)
        waiting, slice_.waiting = slice_.waiting, []
        for worker, clock, _ in waiting:
            replies = [*self.gatherings.begin(slice_, worker, clock, slice_.priority)]
            assert not replies  # their rounds are not complete

    def alone(self, slice_: ServerSlice, do: Callable[[], list[Action]]) -> list[Action]:
        """Do this with a slice that has its own state: now, or after the present round of a flat slice with it."""
        whole = slice_.flat
        if whole is None:
            return do()
        if whole.work or whole.later:
            whole.later.append(partial(self.alone, slice_, do))
            return []
        self.end(whole)
        return do()

    def go_on(self, slice_: ServerSlice) -> list[Action]:
        """A work on the slice is done: do what waited for it."""
        if not isinstance(slice_, FlatSlice) or slice_.work or not slice_.later:
            return []
        self.end(slice_)
        later, slice_.later = slice_.later, []
        return [action for do in later for action in do()]

    def end_idle(self) -> None:
        """End all that have no work."""
        for slice_ in [each for each in self._together if each.work is None]:
            self.end(slice_)
