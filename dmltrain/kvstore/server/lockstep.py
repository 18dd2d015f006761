"""Slices that all workers push and pull together: their state, as if they were one slice. Pure: numpy, no threads.

Theory of operation. The core's cost of a round is the same for a large slice and for a small one. A `Lockstep` is a
ServerSlice whose buffers are lists of its members' buffers, so the core decides once for all of them, and only the
arithmetic is done for each member, on the arrays and in the order in which the core would do it for the member alone.
Its clock is that of its first member; the others differ from it by constants.

A lockstep begins when the members are idle and equally far (`can_begin`). Its members are not used in any other way
until it is dissolved: `dissolve` writes its clocks, pending pushes, pulls and buffers back into them, as if they had
always been pushed and pulled one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server import summing
from dmltrain.kvstore.server.group import Group
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.slice import Push, ServerSlice, Work
from dmltrain.kvstore.step import needs_pulled
from dmltrain.kvstore.transport import wire

MAX_LOOSE = 8  # values of a slice that workers still read since earlier locksteps, when another begins
GROUP = -1  # in place of a key: the slice is a group's number
_NO_ARRAY = np.empty(0, np.uint8)


@dataclass(eq=False, slots=True)
class Parts(Buffer):
    """Memory of all members of a group: flat `arrays`, one for each member, of its type. `parts`: the buffers behind
    them, if the members own these."""

    arrays: Sequence[Array] = ()
    parts: Sequence[Buffer] = ()
    _places: bytes = b""

    @property
    def nbytes(self) -> int:
        return sum([array.nbytes for array in self.arrays])

    def views(self) -> list[memoryview]:
        return [memoryview(array).cast("B") for array in self.arrays if array.size]  # type: ignore[arg-type]

    def places(self) -> bytes:
        """The offsets of its parts in the memory that this server shares, as they are sent."""
        if not self._places:
            self._places = wire.offsets([part.offset or 0 for part in self.parts])
        return self._places

    def part(self, number: int) -> Buffer:
        """The buffer of one member."""
        return self.parts[number] if self.parts else Buffer(self.arrays[number], self.kind)


def of_members(group: Group, parts: list[Buffer]) -> Parts:
    """One value, or push, of all members: a buffer of each. If all buffers are shared memory it has a number."""
    number = group.next_value() if all(part.offset is not None for part in parts) else None
    return Parts(_NO_ARRAY, "value", number, arrays=[part.array for part in parts], parts=parts)


def borrowed(arrays: list[Array], kind: str) -> Parts:
    """A push of all members in memory that they do not own."""
    return Parts(_NO_ARRAY, kind, arrays=arrays)


def can_begin(members: Sequence[ServerSlice], differences: Sequence[int]) -> bool:
    """Whether the members are idle and equally far. `loose` limits memory: each lockstep may leave values behind that
    workers still read, and a worker that never releases one must not collect more and more of them."""
    first = members[0]
    behind = _behind(first)
    return all(
        _is_idle(member)
        and member.loose < MAX_LOOSE
        and not needs_pulled(member.step)  # a lockstep does not keep the values that workers have pulled
        and member.completed == first.completed + difference
        and (member.step is None) == (first.step is None)
        and _behind(member) == behind
        for member, difference in zip(members, differences, strict=True)
    )


def _is_idle(member: ServerSlice) -> bool:
    """Whether all pushes that have arrived are in its value, and all pulls are answered."""
    busy = member.lockstep or member.work or member.rounds or member.waiting
    return not busy and set(member.clocks.values()) == {member.completed}


def _behind(member: ServerSlice) -> dict[int, int]:
    """How many steps were made since each worker's last pull."""
    return {worker: member.steps - member.seen.get(worker, 0) for worker in member.clocks}


class Lockstep(ServerSlice):
    """The state of a group's members. Its buffers consist of theirs. `offset` of a Parts is the number of the value."""

    def __init__(self, group: Group) -> None:
        self.group, self.members = group, group.members
        first = self.members[0]
        super().__init__(
            first.dtype,
            sum(member.length for member in self.members),
            at_once=False,
            is_weight=True,
            codec=None,
            result_codec=None,
            allocate=first.allocate,
            clocks=dict(first.clocks),
            applied=dict(first.applied),
            seen=dict(first.seen),
            arrived=dict(first.arrived),
            completed=first.completed,
            steps=first.steps,
            step=first.step,
        )
        self.began = first.completed, first.steps
        self.each_step = [member.step for member in self.members]
        self.factors = [member.factor for member in self.members]
        self.dissolved = False
        self._parts: set[Parts] = set()  # all that are not lent
        self.value = self._own([_unread_value(member) for member in self.members])
        for member in self.members:
            member.lockstep = self

    def __post_init__(self) -> None:
        """The value is that of the members."""

    # -- as the core uses a slice ---------------------------------------------------------------------------------

    def take(self, kind: str) -> Buffer:
        """Free memory for a value or a push."""
        free = self.spare[kind]
        return free.pop() if free else self._own([member.take(kind) for member in self.members])

    def adopt(self, data: Parts) -> None:
        """Note the memory of a push, which may have been taken before this lockstep began."""
        if data.parts:
            self._parts.add(data)

    def put(self, value: Buffer, coded: Buffer | None) -> None:
        assert isinstance(value, Parts)
        self.value = value
        for member, part in zip(self.members, value.parts, strict=True):
            member.value = part

    def release(self, buffer: Buffer) -> None:
        if not self.dissolved:
            return super().release(buffer)
        assert isinstance(buffer, Parts)
        for member, part in zip(self.members, buffer.parts, strict=True):
            member.release(part)
        buffer.readers -= 1
        if not buffer.readers:
            for member in self.members:
                member.loose -= 1

    def name_for(self, worker: int, key: int, index: int) -> tuple[int, int]:
        return GROUP, self.group.numbers[worker]

    @property
    def work_class(self) -> type[Work]:
        return _GroupWork

    def _own(self, parts: list[Buffer]) -> Parts:
        owned = of_members(self.group, parts)
        self._parts.add(owned)
        return owned

    # -- as its members' states -----------------------------------------------------------------------------------

    def split(self, work: Work) -> list[Work]:
        """The members' works that are this work."""
        return _Splitting(self).work(work)

    def dissolve(self) -> None:
        """Write the state back to the members."""
        self.dissolved = True
        self.group.end(self.completed - self.began[0])
        splitting = _Splitting(self)
        if self.work:
            self.work.parts = splitting.work(self.work)
        for parts in self._parts:
            if parts.readers:
                for member, part in zip(self.members, parts.parts, strict=True):
                    part.readers += parts.readers
                    member.loose += 1
        for number, member in enumerate(self.members):
            member.lockstep = None
            self._write_back(number, member, splitting)
        for buffer in self.spare["value"]:
            assert isinstance(buffer, Parts)
            for member, part in zip(self.members, buffer.parts, strict=True):
                member.give_back(part)

    def _write_back(self, number: int, member: ServerSlice, splitting: _Splitting) -> None:
        further = self.group.differences[number]
        member.clocks = {worker: clock + further for worker, clock in self.clocks.items()}
        member.applied = {worker: clock + further for worker, clock in self.applied.items()}
        member.completed = self.completed + further
        member.rounds = {
            clock + further: {worker: splitting.push(push)[number] for worker, push in pushes.items()}
            for clock, pushes in self.rounds.items()
        }
        member.waiting = [(worker, clock + further, asked) for worker, clock, asked in self.waiting]
        member.arrived, member.priority = dict(self.arrived), self.priority
        member.steps += self.steps - self.began[1]
        member.seen |= {worker: member.steps - self.steps + steps for worker, steps in self.seen.items()}
        member.work = self.work.parts[number] if self.work and self.work.parts else None


class _Splitting:
    """Pushes and works of a lockstep, as those of its members."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._pushes: dict[Push, list[Push]] = {}  # a relay's push is in a round once for each of its workers

    def push(self, push: Push) -> list[Push]:
        if push not in self._pushes:
            data = push.data
            assert isinstance(data, Parts)
            self._pushes[push] = [
                Push(
                    push.worker,
                    push.covers,
                    push.clock + further,
                    push.rate,
                    data.part(number),
                    push.since,
                    push.ready,
                )
                for number, further in enumerate(self._lockstep.group.differences)
            ]
        return self._pushes[push]

    def work(self, work: Work) -> list[Work]:
        return [self._work(work, number) for number in range(len(self._lockstep.members))]

    def _work(self, work: Work, number: int) -> Work:
        lockstep, scratch = self._lockstep, work.scratch
        assert isinstance(work.target, Parts)
        return Work(
            lockstep.group.ids[number],
            lockstep.members[number],
            [[self.push(push)[number] for push in host] for host in work.hosts],
            lockstep.each_step[number],
            work.target.part(number),
            None,
            scratch.part(number) if isinstance(scratch, Parts) else None,
            None,
            work.began,
        )


@dataclass(eq=False, slots=True)
class _GroupWork(Work):
    """A round of slices in lockstep."""

    def run(self) -> None:
        lockstep = self.slice
        assert isinstance(lockstep, Lockstep)
        if self.step is not None:
            for part in lockstep.split(self):
                part.run()
            return
        assert isinstance(self.target, Parts)
        summing.totals([[_arrays(push) for push in host] for host in self.hosts], self.target.arrays, lockstep.factors)


def _arrays(push: Push) -> Sequence[Array]:
    assert isinstance(push.data, Parts)
    return push.data.arrays


def _unread_value(member: ServerSlice) -> Buffer:
    """The member's value, in a buffer that no reply reads: from now on readers are counted for all members at once."""
    before = member.value
    if before.readers:
        member.value = member.take("value")
        np.copyto(member.value.array, before.array)
    return member.value
