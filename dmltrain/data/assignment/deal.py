"""How an elastic job deals out an epoch when its members change. Pure.

A round takes the next `batch` positions of the epoch: first those that came back, in ascending order, then those that
were never dealt. A member at place i of n gets every n-th of them, from number i on. So without a fault each worker has
the samples of a plain job (partition.py), step by step. With shares, a member gets as many of them as its share says,
spread evenly over the round, so that a short last round is divided in the same proportions.

A round is dealt to the members of the view in which the round before was completed, so all members agree on it whatever
they know of the next view. If one is lost before the round is committed, the round is carried into the next view as it
was dealt: the others push their parts, the lost one's part comes back, and the next round is dealt to who is left. So
an epoch uses each position exactly once, and its last rounds may be more, and smaller, than without a fault.
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
    """How a round of `batch` samples is divided: `shares` are the samples of each member, in the members' order; if
    there are none, all members get equally many, the first ones perhaps one more."""

    members: tuple[int, ...]
    batch: int
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != len(self.members) or sum(self.shares) != self.batch):
            raise ValueError(
                f"shares {self.shares} of {self.batch} samples for the members {self.members}, expected one for each "
                f"member, {self.batch} together"
            )

    @cached_property
    def places(self) -> Array:
        """The place of the member who gets each sample of a round, int64 (batch,)."""
        if not self.shares:
            return np.arange(self.batch) % len(self.members)
        moments = [(2.0 * np.arange(share) + 1.0) / share for share in self.shares]  # of a member: equal steps, 0 to 2
        owners = np.repeat(np.arange(len(self.members)), self.shares)
        order: Array = np.lexsort((owners, np.concatenate(moments)))
        return np.take(owners, order)

    def offsets(self, member: int) -> Array:
        """Where in a round the member's samples are, int64, ascending. Raises ValueError for others."""
        return np.flatnonzero(self.places == self.members.index(member))


@dataclass(frozen=True, eq=False)
class Deal:
    """The positions of a round, int64 (dealt,), and how they were divided."""

    positions: Array
    division: Division

    @property
    def dealt(self) -> int:
        return len(self.positions)

    @property
    def members(self) -> tuple[int, ...]:
        """To whom they were dealt."""
        return self.division.members

    def of(self, member: int) -> Array:
        """The member's part; empty for one to whom nothing was dealt."""
        if member not in self.members:
            return self.positions[:0]
        offsets = self.division.offsets(member)
        return np.take(self.positions, offsets[: np.searchsorted(offsets, self.dealt)])

    def without(self, members: Sequence[int]) -> Array:
        """The parts of all others than these."""
        return np.concatenate(
            [self.positions[:0], *(self.of(member) for member in self.members if member not in members)]
        )


class Dealing:
    """An epoch of `samples` positions in rounds of `batch`, those of all members together. `round` is the one that is
    being trained; it has no positions when the epoch is finished. `rounds` have been committed, with `done` samples.

    What `round` has, and what is private here, are places in `_positions`, the positions that this dealing deals out:
    all of the epoch, or a rest of it."""

    def __init__(
        self, samples: int, batch: int, members: Sequence[int], shares: Sequence[int] = (), each: int = 0
    ) -> None:
        """`members` and their `shares` (see Division): of the view in which the last op before the epoch was completed,
        as at each later round. `batch`: of a plain job. `each`: rounds have so many samples for each member instead."""
        self.samples, self.batch, self.each = samples, batch, each
        self._positions: Array | None = None  # int64, ascending; None: all
        self._count = samples  # of them
        self.enter(members, shares)
        self.done = self.rounds = 0
        self._dealt = 0  # from here on they were never dealt
        self._back = np.empty(0, np.int64)  # that came back, ascending
        self.round = self._deal()

    def skip(self, steps: int) -> None:
        """Before the first round: begin after so many steps of a plain job, which an earlier job has made."""
        self.done = self._dealt = min(self.samples, steps * self.batch)
        self.round = self._deal()

    @classmethod
    def of_rest(cls, samples: int, batch: int, members: Sequence[int], positions: Array) -> Dealing:
        """Of these positions, int64, ascending, all that are left of an epoch."""
        made = cls(samples, batch, members)
        made._positions, made._count, made.done = positions, len(positions), samples - len(positions)
        made._dealt = 0
        made.round = made._deal()
        return made

    @property
    def rest(self) -> Array:
        """All positions that are not used yet, int64, ascending."""
        never = np.arange(self._dealt, self._count)
        return self._at(np.concatenate([np.sort(np.concatenate([self._back, self.round.positions])), never]))

    def _at(self, places: Array) -> Array:
        """The positions at these places."""
        return places if self._positions is None else np.take(self._positions, places)

    @property
    def members(self) -> tuple[int, ...]:
        """Of the present view."""
        return self.division.members

    @property
    def finished(self) -> bool:
        return not self.round.dealt

    @property
    def step(self) -> int:
        """The number of a plain job's step with as many samples before it; a schedule's for this round."""
        return self.done // self.batch

    @property
    def returned(self) -> Array:
        """The positions that will be dealt again, as far as is known: with those in the present round's parts of who is
        not a member any more. int64, ascending."""
        return self._at(self._returned)

    @property
    def _returned(self) -> Array:
        return np.sort(np.concatenate([self._back, self.round.without(self.members)]))

    def positions_of(self, member: int) -> Array:
        """The member's part of the present round, int64."""
        return self._at(self.round.of(member))

    def enter(self, members: Sequence[int], shares: Sequence[int] = ()) -> None:
        """From now on these are the members, and their shares. The present round is carried: it stays as it was
        dealt."""
        size = self.each * len(members) or self.batch
        self.division = Division(tuple(members), size, tuple(shares))  # of the next round

    def committed(self, members: Sequence[int], shares: Sequence[int] = ()) -> None:
        """The present round was completed in a view of these members: the parts of all others come back."""
        if self.finished:
            raise ValueError(f"all {self.samples} samples of the epoch are committed")
        self.enter(members, shares)
        self._back = self._returned
        self.done = self.samples - self._count + self._dealt - len(self._back)
        self.rounds += 1
        self.round = self._deal()

    def after(self, members: Sequence[int], shares: Sequence[int] = ()) -> Dealing:
        """What this is when the present round was completed in a view of these members; see committed."""
        ahead = copy.copy(self)
        ahead.committed(members, shares)
        return ahead

    def _deal(self) -> Deal:
        """The next round."""
        size = self.division.batch
        again, self._back = np.split(self._back, [size])
        stop = min(self._count, self._dealt + size - len(again))
        positions = np.concatenate([again, np.arange(self._dealt, stop)])
        self._dealt = stop
        return Deal(positions, self.division)

    def state(self) -> dict[str, Any]:
        """What a new member needs to go on with the others: arrays and whole numbers."""
        return {
            "counts": [self.samples, self.batch, self.each, self.done, self.rounds, self._dealt],
            "of": None if self._positions is None else [*map(list, ranges(self._positions))],
            "next": _row(self.division),
            "back": self._back.tolist(),
            "positions": self.round.positions.tolist(),
            "dealt": _row(self.round.division),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Dealing:
        """The inverse of `state`."""
        samples, batch, each, done, rounds, dealt = state["counts"]
        after, present = (_division(state[name]) for name in ("next", "dealt"))
        made = cls(samples, batch, after.members, after.shares, each)
        made.done, made.rounds, made._dealt = done, rounds, dealt
        if state["of"] is not None:
            made._positions = numbers(state["of"])
            made._count = len(made._positions)
        made._back = np.array(state["back"], np.int64)
        made.round = Deal(np.array(state["positions"], np.int64), present)
        return made

    def part(self, member: int, epoch: Epoch) -> Part:
        """What this member trains if members and shares stay these; step 0 is the present round. ValueError: not a
        member."""
        offsets, ahead, pieces = self.division.offsets(member), copy.copy(self), []
        while not ahead.finished and ahead._is_mixed():
            pieces.append(ahead.round.of(member))
            ahead.committed(self.members, self.division.shares)
        rest, counts = ahead._to_come(offsets)
        positions = self._at(np.concatenate([*pieces, rest]))
        ends = np.cumsum([0, *map(len, pieces), *counts.tolist()]).tolist()
        largest = max(1, len(offsets), *map(len, pieces))

        def bounds(step: int) -> tuple[int, int]:
            return ends[step], ends[step + 1]

        def words(start: int, stop: int) -> Array:
            return epoch.words_at(positions[start:stop])

        order, at_once = epoch.samples_at(positions), window(epoch.shared.shuffle, len(self.members))
        return Part(order, len(ends) - 1, largest, bounds, words, at_once)

    def _is_mixed(self) -> bool:
        """Whether this round is carried or has positions that came back; if it has none, no later one has any."""
        again = self.round.positions[0] < self._dealt - self.round.dealt
        return bool(again or self.round.division != self.division)

    def _to_come(self, offsets: Array) -> tuple[Array, Array]:
        """When no round is mixed: the places of the member with these offsets in this round and all later ones, and how
        many of them each round has; both int64. What `round.of` and `committed` would give one by one."""
        size = self.division.batch
        starts = np.arange(self._dealt - self.round.dealt, self._count, size)
        places = (starts[:, np.newaxis] + offsets).reshape(-1)
        counts = np.searchsorted(offsets, np.minimum(size, self._count - starts))
        return places[: np.searchsorted(places, self._count)], counts


def _row(division: Division) -> list[Any]:
    return [list(division.members), division.batch, list(division.shares)]


def _division(row: Sequence[Any]) -> Division:
    members, batch, shares = row
    return Division(tuple(members), batch, tuple(shares))
