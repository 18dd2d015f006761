"""Which member of an elastic job gets which positions of an epoch, if each makes steps of its own. Pure.

This is for dist_async and dist_ssp. A worker's clock is the number of its steps. An assignment divides the positions
that are left among the members, in rounds that have `step_size` positions for each member: a member at place i of n
gets every n-th position, beginning with the i-th. The first round has number `clock` + 1 for all members, so no member
is ahead of others because of the assignment.

When the members change, each says how many steps it holds, and all compute the same next assignment. A member that is
in the middle of a step keeps its samples and makes that step first: the step is carried. All other positions that are
in no step that the servers have are divided anew. So an epoch uses each position exactly once. The servers know the
steps of a lost worker. A step that only some slices of the weights have made counts as none.

Before the job changes to steps of all members together, an assignment has the carried steps only, and holds the other
positions back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.parts import Epoch, Part, window
from dmltrain.data.assignment.ranges import numbers, ranges


class AsyncAssignment:
    """The assignment of one epoch of `samples` positions, in steps of `step_size`; a plain job's workers have `batch`
    together. `clock`: that of all members at its beginning. `done`: samples of the epoch before it."""

    def __init__(
        self, samples: int, step_size: int, batch: int, members: Sequence[int], clock: int = 0, done: int = 0
    ) -> None:
        self.samples, self.step_size, self.batch, self.members = samples, step_size, batch, tuple(members)
        self.clock, self.done = clock, done
        self.left = np.arange(done, samples)  # positions that this assignment divides, int64, ascending
        self.held_back = self.left[:0]  # positions for a later assignment
        self.carried: dict[int, tuple[int, Array]] = {}  # member -> the number of its step, and positions
        self.finished = False  # all members know that all positions are used

    @classmethod
    def of_rest(
        cls, samples: int, step_size: int, batch: int, members: Sequence[int], clock: int, positions: Array
    ) -> AsyncAssignment:
        """The assignment of these positions, int64, ascending: all that are left of an epoch."""
        assignment = cls(samples, step_size, batch, members, clock, samples - len(positions))
        assignment.left = positions
        return assignment

    def hold_back(self) -> None:
        """Leave only the carried steps in this assignment."""
        self.held_back, self.left = self.left, self.left[:0]

    def finish(self) -> None:
        """All members have made all steps of this assignment, and know this of each other."""
        self.finished, self.done, self.left = True, self.samples, self.left[:0]
        self.carried.clear()

    @property
    def count(self) -> int:
        """Positions that are not used yet, as far as was known when this assignment was made."""
        return len(self._all())

    @property
    def end(self) -> int:
        """The clock of all members when the positions of this assignment are used up."""
        return self.clock + -(-len(self.left) // (self.step_size * len(self.members)))

    @property
    def step(self) -> int:
        """The plain job's step before which as many samples were trained as before this assignment."""
        return -(-self.done // self.batch) if self.finished else self.done // self.batch

    def step_at(self, clock: int) -> int:
        """The step of a learning rate schedule for the next step of a member that holds `clock` steps."""
        return self.step + max(0, clock - self.clock)

    def next_of(self, member: int, clock: int) -> tuple[int, Array] | None:
        """The number and the positions of this member's next step when it holds `clock` steps; None: it has no more."""
        return next(self._steps_from(member, clock), None)

    def _steps_from(self, member: int, clock: int) -> Iterator[tuple[int, Array]]:
        if member in self.carried and clock < self.carried[member][0]:
            yield self.carried[member]
        own = self._own_positions(member)
        for number in range(max(0, clock - self.clock), -(-len(own) // self.step_size)):
            yield self.clock + number + 1, own[number * self.step_size : (number + 1) * self.step_size]

    def _own_positions(self, member: int) -> Array:
        """What this member gets of `left`; empty for a worker that is not a member."""
        if member not in self.members:
            return self.left[:0]
        return self.left[self.members.index(member) :: len(self.members)]

    def steps_between(self, member: int, first: int, last: int) -> Iterable[tuple[int, Array]]:
        """The numbers and positions of the member's steps after clock `first` until `last`."""
        for number, positions in self._steps_from(member, first):
            if number > last:
                return
            yield number, positions

    def before(self, member: int) -> int:
        """A clock before all steps of this member in this assignment."""
        return self.carried[member][0] - 1 if member in self.carried else self.clock

    def after(
        self, members: Sequence[int], clocks: Mapping[int, int], begun: Collection[int], start: int
    ) -> AsyncAssignment:
        """The assignment that follows this one with these `members`. `clocks`: how many steps of each worker count,
        also of those that have left; a worker of which nothing is known is not in it. `begun`: who is in the middle of
        a step. `start`: no member's clock is higher."""
        remain = np.zeros(self.samples, bool)  # whether a position is not used yet
        remain[self._all()] = True
        before = int(remain.sum())
        for member in {*self.members, *self.carried}:
            for _, positions in self.steps_between(member, self.before(member), clocks.get(member, -1)):
                remain[positions] = False
        following = AsyncAssignment(self.samples, self.step_size, self.batch, members, start)
        following.done = self.done + before - int(remain.sum())
        following.carried = {member: step for member in sorted(begun) if (step := self.next_of(member, clocks[member]))}
        for _, positions in following.carried.values():
            remain[positions] = False
        following.left = np.flatnonzero(remain)
        return following

    def _all(self) -> Array:
        """All positions that were not used when this assignment was made."""
        return np.concatenate([self.left, self.held_back, *(positions for _, positions in self.carried.values())])

    def part(self, member: int, clock: int, epoch: Epoch) -> Part:
        """What this member trains, beginning with its next step when it holds `clock` steps; see next_of."""
        pieces = [positions for _, positions in self._steps_from(member, clock)]
        positions = np.concatenate([self.left[:0], *pieces])
        ends = np.cumsum([0, *map(len, pieces)]).tolist()

        def bounds(step: int) -> tuple[int, int]:
            return ends[step], ends[step + 1]

        def words(start: int, stop: int) -> Array:
            return epoch.words_at(positions[start:stop])

        order, at_once = epoch.samples_at(positions), window(epoch.shared.shuffle, len(self.members))
        return Part(order, len(pieces), self.step_size, bounds, words, at_once)

    def state(self) -> dict[str, Any]:
        """What a new member needs to go on with the others: whole numbers."""
        carried = [[member, number, positions.tolist()] for member, (number, positions) in self.carried.items()]
        counts, left = (
            [self.samples, self.step_size, self.batch, self.clock, self.done],
            [*map(list, ranges(self.left))],
        )
        return {"counts": counts, "members": list(self.members), "left": left, "carried": carried}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> AsyncAssignment:
        """The inverse of `state`."""
        samples, step_size, batch, clock, done = state["counts"]
        assignment = cls(samples, step_size, batch, state["members"], clock)
        assignment.done = done
        assignment.left = numbers(state["left"])
        assignment.carried = {
            member: (number, np.array(positions, np.int64)) for member, number, positions in state["carried"]
        }
        return assignment
