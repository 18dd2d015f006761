"""The groups of slices that workers have declared, and their frames. Pure.

A frame of a group stands for the frames of its slices, in their order. If the slices can be in lockstep (lockstep.py),
they are from the first push of the group on. If not, the core gets one push, or pull, after another, and answers each
one. So groups change the cost but never the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.declared import MAX_SLICES, Rejected
from dmltrain.kvstore.server.group import Group
from dmltrain.kvstore.server.lockstep import Lockstep, Parts, borrowed, can_begin, of_members
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.server.workers import Workers

MAX_GROUPS = 4096  # of a worker


class Core(Protocol):
    """The part of the core that groups need; ServerCore has the descriptions."""

    workers: Workers

    def push_to(
        self,
        slice_: ServerSlice,
        worker: int,
        key: int,
        index: int,
        clock: int,
        rate: float,
        data: Buffer,
        now: float,
        age: float,
    ) -> list[Action]: ...

    def pull_of(
        self, slice_: ServerSlice, worker: int, key: int, index: int, clock: int, now: float, priority: int
    ) -> list[Action]: ...


@dataclass(eq=False)
class Groups:
    """All groups of a core, whose slices are `slices`. Workers are identified as in the core, groups by the number that
    the worker has given them. All methods raise Rejected."""

    core: Core
    slices: dict[tuple[int, int], ServerSlice]
    _by_number: dict[int, list[Group]] = field(default_factory=dict)  # of each worker
    _by_content: dict[tuple[tuple[int, int, int], ...], Group] = field(default_factory=dict)
    _locksteps: dict[Group, Lockstep] = field(default_factory=dict)
    _values: Iterator[int] = field(default_factory=itertools.count)

    def declare(self, worker: int, number: int, content: Sequence[tuple[int, int, int]]) -> None:
        """From now on `number` means these slices to this worker: keys, slices, and differences of their clocks."""
        own = self._by_number.setdefault(worker, [])
        if number != len(own):
            raise Rejected(f"worker {worker} declares group {number}, expected {len(own)}")
        if number == MAX_GROUPS or sum(len(known.ids) for known in own) + len(content) > MAX_SLICES:
            raise Rejected(f"worker {worker} declares more than {MAX_GROUPS} groups, or {MAX_SLICES} slices in them")
        group = self._by_content.get(tuple(content)) or self._new(worker, number, content)
        if worker in group.numbers:
            raise Rejected(f"worker {worker} declares groups {group.numbers[worker]} and {number} with the same slices")
        group.numbers[worker] = number
        own.append(group)

    def _new(self, worker: int, number: int, content: Sequence[tuple[int, int, int]]) -> Group:
        ids = [(key, index) for key, index, _ in content]
        members = [self.slices[id] for id in ids if id in self.slices]
        if len(members) < len(ids) or len(set(ids)) < len(ids) or content[0][2] != 0:
            raise Rejected(f"worker {worker} declares group {number} with unknown slices, or with one of them twice")
        if any(member.codec or member.at_once or member.pusher >= 0 or not member.is_weight for member in members):
            raise Rejected(f"worker {worker} declares group {number} with slices that cannot be in one")
        group = Group(ids, members, [difference for _, _, difference in content], lambda: next(self._values))
        self._by_content[tuple(content)] = group
        return group

    def find(self, worker: int, number: int) -> Group:
        """The group that the worker means."""
        own = self._by_number.get(worker, [])
        if number >= len(own):
            raise Rejected(f"worker {worker} means group {number}, but has declared {len(own)}")
        return own[number]

    def in_lockstep(self) -> Iterator[Lockstep]:
        """The locksteps of all groups."""
        return (lockstep for lockstep in self._locksteps.values() if not lockstep.dissolved)

    def _alone(self, id: tuple[int, int]) -> ServerSlice:
        """A member that is now pushed or pulled alone."""
        slice_ = self.slices[id]
        slice_.leave_group()
        return slice_

    def _lockstep(self, group: Group) -> Lockstep | None:
        lockstep = self._locksteps.get(group)
        return lockstep if lockstep and not lockstep.dissolved else None

    def _begun(self, group: Group) -> Lockstep | None:
        """The group's lockstep, which may begin now."""
        lockstep = self._lockstep(group)
        if lockstep is None and group.may_begin and can_begin(group.members, group.differences):
            lockstep = self._locksteps[group] = Lockstep(group)
        return lockstep

    def lend(self, worker: int, number: int, payload: bytes, view: Callable[[int, int], Array]) -> Parts:
        """A push in the worker's shared memory; `view(offset, size)` is that memory. Raises also FrameError, and what
        `view` raises."""
        return borrowed(self.find(worker, number).found(worker, payload, view), "lent")

    def buffer(self, worker: int, number: int, nbytes: int, clock: int, memory: Callable[[int], Array]) -> Parts:
        """Memory for a push that will be received; for one that completes a round, see ServerCore.completing_buffer."""
        group = self.find(worker, number)
        if nbytes != group.nbytes:
            raise Rejected(f"worker {worker} sent {nbytes} bytes for group {number}, expected {group.nbytes}")
        lockstep = self._lockstep(group)
        if lockstep and lockstep.lacks_only(self.core.workers.covers[worker], clock):
            return borrowed(_cut(memory(nbytes), group.members), "completing")
        if lockstep:
            taken = lockstep.take("value")
            assert isinstance(taken, Parts)
            return taken
        return of_members(group, [member.take_for_push() for member in group.members])

    def push(
        self, worker: int, number: int, clock: int, rate: float, data: Parts, now: float, age: float
    ) -> list[Action]:
        """ServerCore.push of all members; `clock` is that of the first."""
        group = self.find(worker, number)
        if lockstep := self._begun(group):
            lockstep.adopt(data)
            return self.core.push_to(lockstep, worker, *group.ids[0], clock, rate, data, now, age)
        actions = []
        for place, (id, further) in enumerate(zip(group.ids, group.differences, strict=True)):
            slice_, part = self._alone(id), data.part(place)
            actions += self.core.push_to(slice_, worker, *id, clock + further, rate, part, now, age)
        return actions

    def pull(self, worker: int, number: int, clock: int, now: float, priority: int) -> list[Action]:
        """ServerCore.pull of all members; `clock` is that of the first."""
        group = self.find(worker, number)
        if clock + min(group.differences) < 0:  # checked before the core changes anything: a clock is sent as unsigned
            raise Rejected(f"worker {worker} pulls group {number} at clock {clock}, before the first clock of a slice")
        if lockstep := self._lockstep(group):
            return self.core.pull_of(lockstep, worker, *group.ids[0], clock, now, priority)
        return [
            action
            for id, further in zip(group.ids, group.differences, strict=True)
            for action in self.core.pull_of(self._alone(id), worker, *id, clock + further, now, priority)
        ]


def _cut(memory: Array, members: Sequence[ServerSlice]) -> list[Array]:
    """The members' arrays, one after another in `memory` (bytes, uint8)."""
    ends = list(itertools.accumulate(member.push_bytes for member in members))
    return [memory[end - member.push_bytes : end].view(member.dtype) for end, member in zip(ends, members, strict=True)]
