"""Small slices that workers push and pull as one: a flat slice. Pure: numpy, no threads.

Theory of operation. The cost of a round is the same for a large slice and for a small one. So while all workers push
and pull some slices together, the flat slice has their state: one clock, one round, one value, in which they lie one
after another (transport/flat.py). Only an optimizer makes its step on each member alone, so every member has the bits
that it would have alone.

That begins when the members are idle and equally far (`can_begin`), and ends as soon as one of them is used in another
way. Then `end` writes clocks, pushes and the value back to the members. While a flat slice is `apart`, core.py divides
its pushes among the members, and its pulls get copies of their values (gathering.py). So a flat slice changes the cost
and never a value, and workers need not agree on what they push together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.memory import Buffer, Memory
from dmltrain.kvstore.server.pushes import Push, Pushes
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.step import OptimizerStep, needs_pulled
from dmltrain.kvstore.transport import flat

if TYPE_CHECKING:
    from dmltrain.kvstore.server.gathering import Gathering
    from dmltrain.kvstore.server.reply import Action

LASTING = 8  # rounds that are worth the copies at the beginning and the end
MAX_SHORT = 8  # times that it may last less; after these the members are pushed one by one for good
_NOTHING = np.empty(0, np.uint8)


class FlatSlice(ServerSlice):
    """`ids`: key and slice of each member. `later`: what waits for the end of the present round, because it concerns
    members alone."""

    def __init__(
        self, number: int, ids: Sequence[tuple[int, int]], members: Sequence[ServerSlice], memory: Memory
    ) -> None:
        first, self.number, self.ids, self._members, self._memory = members[0], number, ids, members, memory
        self.places = flat.layout([member.length for member in members], np.dtype(first.dtype).itemsize)
        self._place_of = dict(zip(members, self.places, strict=True))
        self.apart = True
        self.later: list[Callable[[], list[Action]]] = []
        self.gatherings: list[Gathering] = []  # pulls while it is apart
        self._short, self._began = 0, (0, 0)  # rounds and steps
        length = self.places[-1].stop
        pushes = Pushes(False, {}, {})
        super().__init__(first.dtype, length, pushes, True, None, None, memory.take, retired=memory.give_back)

    def __post_init__(self) -> None:
        """It has no memory while it is apart."""
        self.value = Buffer(_NOTHING, "none")

    # -- as the core uses a slice ---------------------------------------------------------------------------------

    def named(self, key: int, index: int) -> tuple[int, int]:
        return self.ids[0]

    def take_for_push(self) -> Buffer:
        if not self.apart:
            return super().take_for_push()
        return Buffer(np.empty(self.length, self.dtype), "received", of=self)

    @property
    def members(self) -> Sequence[ServerSlice]:
        return self._members

    def place(self, member: ServerSlice) -> slice:
        """Where a member lies."""
        return self._place_of[member]

    def part(self, member: ServerSlice) -> Array:
        return self.value.array[self._place_of[member]]

    def divided(self, data: Buffer) -> list[Buffer]:
        """A push, as one for each member."""
        whole, kind = data.array, data.kind
        if kind == "value":  # this slice needs its memory again
            whole, kind = whole.copy(), "received"
            self.give_back(data)
        return [Buffer(whole[place], kind) for place in self.places]

    # -- beginning and end ----------------------------------------------------------------------------------------

    def can_begin(self) -> bool:
        """Whether the members are idle and equally far."""
        first = self.members[0]
        if self._short == MAX_SHORT or self.gatherings or not _is_idle(first):
            return False
        return all(
            _is_idle(member)
            and member.pushes.completed == first.pushes.completed
            and (member.step is None) == (first.step is None)
            and all([member.behind(worker) == first.behind(worker) for worker in member.pushes.clocks])
            for member in self.members
        )

    def begin(self) -> None:
        """From now on this slice has the members' state."""
        first = self.members[0]
        self.apart, self.retired = False, None
        self.value = self.take("value")
        for member, place in self._place_of.items():
            self.value.array[place] = member.value.array
            member.flat = self
        self.pushes.go_on_as(first.pushes)
        self.seen, self.arrived = dict(first.seen), dict(first.arrived)
        self.steps, self.factor = first.steps, first.factor
        self._began = first.pushes.completed, first.steps
        self.step = first.step and _Steps([member.step for member in self.members], self.places)

    def end(self) -> None:
        """Give the state back to the members. No work may be in progress."""
        self._short += self.pushes.completed - self._began[0] < LASTING
        self.apart = True
        self._write_pushes()
        for member in self.members:
            self._write_state(member)
        self.retired, value, self.value = self._memory.give_back, self.value, Buffer(_NOTHING, "none")
        free, self.spare["value"] = self.spare["value"], []
        for buffer in (value, *free):
            self.give_back(buffer)

    def _write_state(self, member: ServerSlice) -> None:
        value, member.flat = self.part(member), None
        if member.value.readers:
            member.value = member.take("value")
        member.value.array[:] = value
        member.pushes.go_on_as(self.pushes)
        member.arrived, member.priority = dict(self.arrived), self.priority
        member.steps += self.steps - self._began[1]
        member.seen |= {worker: member.steps - self.steps + steps for worker, steps in self.seen.items()}

    def _write_pushes(self) -> None:
        """The rounds that are not complete."""
        rounds = self.pushes.rounds
        pushes = {push: _cut(push, self.divided(push.data)) for here in rounds.values() for push in here.values()}
        for number, member in enumerate(self.members):
            member.pushes.rounds = {
                clock: {worker: pushes[push][number] for worker, push in here.items()} for clock, here in rounds.items()
            }
        rounds.clear()


def _cut(push: Push, parts: Sequence[Buffer]) -> list[Push]:
    return [Push(push.worker, push.covers, push.clock, push.rate, part, push.since, push.ready) for part in parts]


def _is_idle(member: ServerSlice) -> bool:
    """Whether all pushes that have arrived are in its value, and all pulls are answered. (A flat slice keeps no values
    that workers have pulled for a step.)"""
    pushes = member.pushes
    busy = member.flat or member.work or pushes.rounds or member.waiting
    settled = set(pushes.clocks.values()) == {pushes.completed}
    return settled and not (busy or member.initial or needs_pulled(member.step))


class _Steps:
    """The members' steps of the optimizer, one after another."""

    def __init__(self, steps: Sequence[OptimizerStep | None], places: Sequence[slice]) -> None:
        self._parts = [(step, place) for step, place in zip(steps, places, strict=True) if step]

    def __call__(self, value: Array, gradient: Array, rate: float) -> None:
        for step, place in self._parts:
            step(value[place], gradient[place], rate)

    def state(self) -> dict[str, Array]:
        """The members have it."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError
