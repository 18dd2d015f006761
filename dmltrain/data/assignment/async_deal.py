"""How an elastic job deals out an epoch if each worker makes steps of its own (dist_async, dist_ssp). Pure.

A worker counts its steps: its clock. A deal divides the positions that are left among the members, in rounds of as many
positions for each as a step has: a member at place i of n gets every n-th of them, from number i on. Rounds have
numbers above `clock`, the same for all members, so that nobody is ahead of others because of the deal.

When members change, all say how many steps they hold, and each agrees on the next deal. A member that is in the middle
of a step keeps its samples, and makes that step first: it is carried. All other positions that are in no step that the
servers have are divided anew. So an epoch uses each position exactly once. The steps of a lost worker are known from
the servers. One that only some slices have made counts as none.

Before the job changes to steps of all members together, a deal has only the carried steps, and holds the rest back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.parts import Epoch, Part, window
from dmltrain.data.assignment.ranges import numbers, ranges


class AsyncDealing:
    """An epoch of `samples` positions in steps of `each`; a plain job's workers have `batch` together. `clock`: that of
    all members at the first deal. `done`: samples before it."""

    def __init__(
        self, samples: int, each: int, batch: int, members: Sequence[int], clock: int = 0, done: int = 0
    ) -> None:
        self.samples, self.each, self.batch, self.members = samples, each, batch, tuple(members)
        self.clock, self.done = clock, done
        self.left = np.arange(done, samples)  # that are divided in this deal, int64, ascending
        self.held = self.left[:0]  # that are dealt in a later one
        self.carried: dict[int, tuple[int, Array]] = {}  # member -> the number of its step, and positions
        self.finished = False  # all members know that all positions are used

    @classmethod
    def of_rest(
        cls, samples: int, each: int, batch: int, members: Sequence[int], clock: int, positions: Array
    ) -> AsyncDealing:
        """Of these positions, int64, ascending, all that are left of an epoch."""
        made = cls(samples, each, batch, members, clock, samples - len(positions))
        made.left = positions
        return made

    def hold_back(self) -> None:
        """Only carried steps are made in this deal."""
        self.held, self.left = self.left, self.left[:0]

    def finish(self) -> None:
        """All members have made all steps of this deal, and know it of each other."""
        self.finished, self.done, self.left = True, self.samples, self.left[:0]
        self.carried.clear()

    @property
    def count(self) -> int:
        """Positions that are not used yet, as far as was known when this deal was made."""
        return len(self._all())

    @property
    def end(self) -> int:
        """The clock of all members when the positions of this deal are used up."""
        return self.clock + -(-len(self.left) // (self.each * len(self.members)))

    @property
    def step(self) -> int:
        """The step of a plain job that has as many samples before it as this deal."""
        return self.done // self.batch

    def step_at(self, clock: int) -> int:
        """The step of a plain job that is like the next one of a member that holds `clock`; a schedule's."""
        return self.step + max(0, clock - self.clock)

    def next_of(self, member: int, clock: int) -> tuple[int, Array] | None:
        """The number and the positions of the step that this member makes when it holds `clock`; None: no step."""
        return next(self._from(member, clock), None)

    def _from(self, member: int, clock: int) -> Iterator[tuple[int, Array]]:
        if member in self.carried and clock < self.carried[member][0]:
            yield self.carried[member]
        own = self._own(member)
        for number in range(max(0, clock - self.clock), -(-len(own) // self.each)):
            yield self.clock + number + 1, own[number * self.each : (number + 1) * self.each]

    def _own(self, member: int) -> Array:
        """What this member gets of `left`; empty for others."""
        if member not in self.members:
            return self.left[:0]
        return self.left[self.members.index(member) :: len(self.members)]

    def steps_between(self, member: int, first: int, last: int) -> Iterable[tuple[int, Array]]:
        """The numbers and positions of the member's steps after clock `first` until `last`."""
        for number, positions in self._from(member, first):
            if number > last:
                return
            yield number, positions

    def before(self, member: int) -> int:
        """A clock before all steps of this member in this deal."""
        return self.carried[member][0] - 1 if member in self.carried else self.clock

    def after(
        self, members: Sequence[int], clocks: Mapping[int, int], begun: Collection[int], start: int
    ) -> AsyncDealing:
        """The deal that follows this one with these `members`. `clocks`: how many steps of each worker count, also of
        those that have left; without those of whom nothing is known. `begun`: who is in the middle of a step. `start`:
        nobody is beyond this clock."""
        remain = np.zeros(self.samples, bool)
        remain[self._all()] = True
        before = int(remain.sum())
        for member in {*self.members, *self.carried}:
            for _, positions in self.steps_between(member, self.before(member), clocks.get(member, -1)):
                remain[positions] = False
        dealt = AsyncDealing(self.samples, self.each, self.batch, members, start)
        dealt.done = self.done + before - int(remain.sum())
        dealt.carried = {each: step for each in sorted(begun) if (step := self.next_of(each, clocks[each]))}
        for _, positions in dealt.carried.values():
            remain[positions] = False
        dealt.left = np.flatnonzero(remain)
        return dealt

    def _all(self) -> Array:
        """All positions of this deal."""
        return np.concatenate([self.left, self.held, *(positions for _, positions in self.carried.values())])

    def part(self, member: int, clock: int, epoch: Epoch) -> Part:
        """What this member trains from the step on that it makes when it holds `clock`; see next_of."""
        pieces = [positions for _, positions in self._from(member, clock)]
        positions = np.concatenate([self.left[:0], *pieces])
        ends = np.cumsum([0, *map(len, pieces)]).tolist()

        def bounds(step: int) -> tuple[int, int]:
            return ends[step], ends[step + 1]

        def words(start: int, stop: int) -> Array:
            return epoch.words_at(positions[start:stop])

        order, at_once = epoch.samples_at(positions), window(epoch.shared.shuffle, len(self.members))
        return Part(order, len(pieces), self.each, bounds, words, at_once)

    def state(self) -> dict[str, Any]:
        """What a new member needs to go on with the others: whole numbers."""
        carried = [[member, number, positions.tolist()] for member, (number, positions) in self.carried.items()]
        counts, left = [self.samples, self.each, self.batch, self.clock, self.done], [*map(list, ranges(self.left))]
        return {"counts": counts, "members": list(self.members), "left": left, "carried": carried}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> AsyncDealing:
        """The inverse of `state`."""
        samples, each, batch, clock, done = state["counts"]
        made = cls(samples, each, batch, state["members"], clock)
        made.done = done
        made.left = numbers(state["left"])
        made.carried = {member: (number, np.array(each, np.int64)) for member, number, each in state["carried"]}
        return made
