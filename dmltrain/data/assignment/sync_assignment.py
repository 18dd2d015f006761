"""Which member of an elastic job gets which positions of an epoch, if all members make each round together. Pure.

A round takes the next `batch` positions of the epoch: first those that were returned by a loss, in ascending order,
then new ones. A member at place i of n gets every n-th of them, beginning with the i-th. So without a fault each worker
has the samples of a plain job (partition.py), step by step. With shares, a member gets as many of them as its share
says, spread evenly over the round, so that a short last round is divided in the same proportions.

A round is assigned to the members of the view in which the round before it was completed. All members know that view,
so they agree on the round even if only some of them know the next view. If a member is lost before the round is
committed, the round is carried into the next view with the same parts: the other members push theirs, the part of the
lost member is returned, and the next round is divided among the members that are left. So an epoch uses each position
exactly once; after a loss its last rounds may be more, and smaller.

A round is one step of all members. With local steps (dist_local) it is an average of weights: a member divides its part
of the round among its steps, in order, so that without a fault each step has the samples of a plain job, too.

The log lines and files of a job say "deal" for assigning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.parts import Epoch, Part, window
from dmltrain.data.assignment.ranges import numbers, ranges


@dataclass(frozen=True)
class Division:
    """How a round of `batch` samples is divided. `shares`: the samples of each member, in the order of `members`; if
    empty, all members get equally many, the first ones perhaps one more. `local_steps`: so many steps of each member
    make the round."""

    members: tuple[int, ...]
    batch: int
    shares: tuple[int, ...] = ()
    local_steps: int = 1

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != len(self.members) or sum(self.shares) != self.batch):
            raise ValueError(
                f"shares {self.shares} of {self.batch} samples for the members {self.members}, expected one for each "
                f"member, {self.batch} together"
            )

    @property
    def step_size(self) -> int:
        """The samples of all members in a step."""
        return self.batch // self.local_steps

    @property
    def own_size(self) -> int:
        """A member has at most so many samples in a step; with local steps exactly, but for the round's last ones."""
        return self.step_size if self.local_steps == 1 else self.step_size // len(self.members)

    def steps(self, size: int) -> int:
        """How many steps a round of this size has; only the last round of an assignment has fewer than others."""
        return -(-size // self.step_size)

    @cached_property
    def places(self) -> Array:
        """For each sample of a round, the place of the member who gets it, int64 (batch,)."""
        if not self.shares:
            return np.arange(self.batch) % len(self.members)
        # Each member's samples are at equal distances between 0 and 2; sorted, they are spread evenly over the round.
        # Equal points are in the order of the members, so all members compute the same result.
        points = [(2.0 * np.arange(share) + 1.0) / share for share in self.shares]
        owners = np.repeat(np.arange(len(self.members)), self.shares)
        order: Array = np.lexsort((owners, np.concatenate(points)))
        return np.take(owners, order)

    def offsets(self, member: int) -> Array:
        """The indices of the member's samples in a round, int64, ascending. ValueError: not a member."""
        return np.flatnonzero(self.places == self.members.index(member))


@dataclass(frozen=True, eq=False)
class RoundAssignment:
    """The positions of one round, int64 (size,), and how they are divided."""

    positions: Array
    division: Division

    @property
    def size(self) -> int:
        return len(self.positions)

    @property
    def members(self) -> tuple[int, ...]:
        """Those who have a part of the round."""
        return self.division.members

    def steps_of(self, member: int) -> int:
        """How many steps of the member the round has, perhaps without samples; 1 also if it has no part."""
        return self.division.steps(self.size) if member in self.members else 1

    def of(self, member: int) -> Array:
        """The member's part; empty for a worker that is not one of `members`."""
        if member not in self.members:
            return self.positions[:0]
        offsets = self.division.offsets(member)
        return np.take(self.positions, offsets[: np.searchsorted(offsets, self.size)])

    def without(self, members: Sequence[int]) -> Array:
        """The parts of all members that are not in `members`."""
        return np.concatenate(
            [self.positions[:0], *(self.of(member) for member in self.members if member not in members)]
        )


class SyncAssignment:
    """The assignment of one epoch of `samples` positions, in rounds of `batch` positions for all members together.

    `round` is the one that is being trained; it has no positions when the epoch is finished. `done` is the number of
    samples of the committed rounds, `steps` that of their steps.

    If only a rest of the epoch is assigned, `_positions` has it. What `round` and private attributes hold are then not
    positions, but indices into `_positions`.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        members: Sequence[int],
        shares: Sequence[int] = (),
        per_member: int = 0,
        local_steps: int = 1,
    ) -> None:
        """`members` and their `shares` (see Division): those of the view in which the last op before the epoch was
        completed. `batch`: of a step of a plain job. `per_member`: if not 0, a round has so many samples for each
        member, and not `batch`. `local_steps`: so many steps of each member make a round; more than 1 only with
        `per_member`."""
        self.samples, self.batch, self.per_member, self.local_steps = samples, batch, per_member, local_steps
        self._positions: Array | None = None  # int64, ascending; None: all of the epoch
        self._count = samples  # of positions
        self.enter(members, shares)
        self.done = self.steps = 0
        self._next_new = 0  # the first index that was never in a round
        self._to_reassign = np.empty(0, np.int64)  # returned by losses, not in a round again yet; ascending
        self.round = self._next_round()

    def skip(self, steps: int) -> None:
        """Call it before the first round: the epoch begins after `steps` steps of a plain job, which a job before has
        made."""
        self.done = self._next_new = min(self.samples, steps * self.batch)
        self.steps = steps
        self.round = self._next_round()

    @classmethod
    def of_rest(cls, samples: int, batch: int, members: Sequence[int], positions: Array) -> SyncAssignment:
        """The assignment of these positions, int64, ascending: all that are left of an epoch."""
        assignment = cls(samples, batch, members)
        assignment._positions, assignment._count = positions, len(positions)
        assignment.done = samples - len(positions)
        assignment._next_new = 0  # the constructor has assigned a first round of the whole epoch
        assignment.round = assignment._next_round()
        return assignment

    @property
    def rest(self) -> Array:
        """All positions that are not used yet, int64, ascending."""
        new = np.arange(self._next_new, self._count)
        old = np.sort(np.concatenate([self._to_reassign, self.round.positions]))
        return self._positions_at(np.concatenate([old, new]))

    def _positions_at(self, indices: Array) -> Array:
        return indices if self._positions is None else np.take(self._positions, indices)

    @property
    def members(self) -> tuple[int, ...]:
        """Of the present view."""
        return self.division.members

    @property
    def finished(self) -> bool:
        return not self.round.size

    @property
    def step(self) -> int:
        """The plain job's step before which as many samples were trained: the step of a learning rate schedule."""
        return -(-self.done // self.batch) if self.finished else self.done // self.batch

    @property
    def returned(self) -> Array:
        """The positions that will be assigned again, as far as is known, int64, ascending. They include the parts of
        the present round whose owners are not members any more."""
        return self._positions_at(self._returned)

    @property
    def _returned(self) -> Array:
        return np.sort(np.concatenate([self._to_reassign, self.round.without(self.members)]))

    def positions_of(self, member: int) -> Array:
        """The member's part of the present round, int64."""
        return self._positions_at(self.round.of(member))

    def step_after(self, made: int) -> int:
        """`step` when each member has made so many steps of the present round."""
        return (self.done + made * self.round.division.step_size) // self.batch if made else self.step

    def step_of(self, member: int, made: int) -> Array:
        """The positions of the member's next step of the present round, of which it has made so many, int64."""
        own = self.round.division.own_size
        return self.positions_of(member)[made * own : (made + 1) * own]

    def enter(self, members: Sequence[int], shares: Sequence[int] = ()) -> None:
        """Set the members, and their shares, for the next round. The present round keeps its parts: it is carried."""
        size = self.per_member * len(members) or self.batch
        self.division = Division(tuple(members), size, tuple(shares), self.local_steps)  # of the next round

    def committed(self, members: Sequence[int], shares: Sequence[int] = ()) -> None:
        """Go on to the next round: the present one was completed in a view of these members. The parts of all others
        are returned."""
        if self.finished:
            raise ValueError(f"all {self.samples} samples of the epoch are committed")
        self.enter(members, shares)
        self._to_reassign = self._returned
        self.done = self.samples - self._count + self._next_new - len(self._to_reassign)
        self.steps += self.round.division.steps(self.round.size)
        self.round = self._next_round()

    def after(self, members: Sequence[int], shares: Sequence[int] = ()) -> SyncAssignment:
        """A copy for which `committed` was called with these arguments."""
        ahead = copy.copy(self)
        ahead.committed(members, shares)
        return ahead

    def _next_round(self) -> RoundAssignment:
        size = self.division.batch
        returned, self._to_reassign = np.split(self._to_reassign, [size])
        stop = min(self._count, self._next_new + size - len(returned))
        positions = np.concatenate([returned, np.arange(self._next_new, stop)])
        self._next_new = stop
        return RoundAssignment(positions, self.division)

    def state(self) -> dict[str, Any]:
        """What a new member needs to go on with the others: arrays and whole numbers."""
        return {
            "counts": [self.samples, self.batch, self.per_member, self.done, self.steps, self._next_new],
            "of": None if self._positions is None else [*map(list, ranges(self._positions))],
            "next": _row(self.division),
            "back": self._to_reassign.tolist(),
            "positions": self.round.positions.tolist(),
            "dealt": _row(self.round.division),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SyncAssignment:
        """The inverse of `state`."""
        samples, batch, per_member, done, steps, next_new = state["counts"]
        next_division, present = (_division(state[name]) for name in ("next", "dealt"))
        members, shares, local_steps = next_division.members, next_division.shares, next_division.local_steps
        assignment = cls(samples, batch, members, shares, per_member, local_steps)
        assignment.done, assignment.steps, assignment._next_new = done, steps, next_new
        if state["of"] is not None:
            assignment._positions = numbers(state["of"])
            assignment._count = len(assignment._positions)
        assignment._to_reassign = np.array(state["back"], np.int64)
        assignment.round = RoundAssignment(np.array(state["positions"], np.int64), present)
        return assignment

    def part(self, member: int, epoch: Epoch) -> Part:
        """What this member trains if members and shares do not change; step 0 is the first of the present round.
        ValueError: not a member."""
        offsets, ahead, pieces, steps = self.division.offsets(member), copy.copy(self), [], list[int]()
        while not ahead.finished and ahead._is_mixed():
            pieces.append(ahead.round.of(member))
            steps.append(ahead.round.steps_of(member))
            ahead.committed(self.members, self.division.shares)
        later, counts = ahead._later_rounds(offsets)
        positions = self._positions_at(np.concatenate([*pieces, later]))
        sizes = [*map(len, pieces), *counts.tolist()]
        if self.local_steps > 1:
            sizes = _sizes_of_steps(sizes, [*steps, *ahead._steps_of_later_rounds()], self.division.own_size)
        ends = np.cumsum([0, *sizes]).tolist()
        largest = max(1, *sizes, min(len(offsets), self.division.own_size))

        def bounds(step: int) -> tuple[int, int]:
            return ends[step], ends[step + 1]

        def words(start: int, stop: int) -> Array:
            return epoch.words_at(positions[start:stop])

        order, at_once = epoch.samples_at(positions), window(epoch.shared.shuffle, len(self.members))
        return Part(order, len(ends) - 1, largest, bounds, words, at_once)

    def _steps_of_later_rounds(self) -> list[int]:
        """See _later_rounds: how many steps each round has."""
        size = self.division.batch
        starts = range(self._next_new - self.round.size, self._count, size)
        return [self.division.steps(min(size, self._count - start)) for start in starts]

    def _is_mixed(self) -> bool:
        """Whether this round is carried or has returned positions; if not, no later round is mixed either."""
        has_returned = self.round.positions[0] < self._next_new - self.round.size
        return bool(has_returned or self.round.division != self.division)

    def _later_rounds(self, offsets: Array) -> tuple[Array, Array]:
        """If no round is mixed: the indices that the member with these offsets gets in this round and all later ones,
        and how many of them each round has; both int64. `round.of` and `committed` give the same, round by round, but
        take a Python call for each."""
        size = self.division.batch
        starts = np.arange(self._next_new - self.round.size, self._count, size)
        indices = (starts[:, np.newaxis] + offsets).reshape(-1)
        counts = np.searchsorted(offsets, np.minimum(size, self._count - starts))
        return indices[: np.searchsorted(indices, self._count)], counts


def _row(division: Division) -> list[Any]:
    return [list(division.members), division.batch, list(division.shares), division.local_steps]


def _division(row: Sequence[Any]) -> Division:
    members, batch, shares, local_steps = row
    return Division(tuple(members), batch, tuple(shares), local_steps)


def _sizes_of_steps(sizes: Sequence[int], steps: Sequence[int], own: int) -> list[int]:
    """The samples of each step of a member whose parts of rounds have these sizes, in so many steps each."""
    return [
        min(own, max(0, size - made * own)) for size, number in zip(sizes, steps, strict=True) for made in range(number)
    ]
