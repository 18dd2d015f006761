"""Pulls of flat slices that are apart: each gets the members' values one after another, when their rounds complete, as
it would if it were a pull of each member. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.reply import Reply
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.transport.wire import DTYPES


@dataclass(eq=False)
class Gathering:
    """A pull of a flat slice by `worker` at `clock`. `missing`: how many members' values are not in `array` yet."""

    of: FlatSlice
    worker: int
    clock: int
    priority: int
    array: Array
    missing: int
    others: int = 0  # optimizer steps by others since this worker's last pull, at most
    waited: float = 0.0  # s; see wire.Header
    worked: float = 0.0

    def take(self, member: ServerSlice, state: ServerSlice) -> None:
        """Copy the member's value; `state` is the member, or another flat slice that has its state."""
        self.array[self.of.place(member)] = state.part(member)
        self.others = max(self.others, state.behind(self.worker) - 1)
        state.seen[self.worker] = state.steps
        state.note_pull(self.worker)
        if arrival := state.arrived.get(self.worker):
            self.waited, self.worked = arrival.behind, arrival.applied - arrival.complete
        self.missing -= 1

    def reply(self) -> Reply:
        """All values are there."""
        buffer = Buffer(self.array, "gathered", readers=1)
        dtype = DTYPES.index(self.of.dtype)
        times = self.waited, self.worked, self.priority
        return Reply(self.worker, self.of.number, 0, self.clock, float(self.others), buffer, dtype, *times, self.of)


@dataclass(eq=False)
class Gatherings:
    """Those that wait for values, by member."""

    _waiting: dict[ServerSlice, list[Gathering]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, of: FlatSlice, worker: int, clock: int, priority: int) -> Iterator[Reply]:
        """A pull of a flat slice that is apart. The reply, if all values are there."""
        gathering = Gathering(of, worker, clock, priority, np.zeros(of.length, of.dtype), len(of.members))
        of.gatherings.append(gathering)
        for member in of.members:
            yield from self._offer(member, gathering)

    def offer(self, members: Sequence[ServerSlice]) -> Iterator[Reply]:
        """Rounds of these have completed. The replies that are complete."""
        for member in members if self._waiting else ():
            for gathering in self._waiting.pop(member, ()):
                yield from self._offer(member, gathering)

    def _offer(self, member: ServerSlice, gathering: Gathering) -> Iterator[Reply]:
        state = member.flat or member
        if state.pushes.completed < gathering.clock or state.is_changing:
            self._waiting[member].append(gathering)
            return
        gathering.take(member, state)
        if not gathering.missing:
            gathering.of.gatherings.remove(gathering)
            yield gathering.reply()
