"""The rounds of an epoch in a job that is not elastic. rounds/member_rounds.py has those of one that is."""

from __future__ import annotations

from typing import Protocol

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.parts import Epoch, Part
from dmltrain.data.assignment.sync_assignment import SyncAssignment


class Rounds(Protocol):
    """See rounds/member_rounds.py."""

    @property
    def assignment(self) -> SyncAssignment | AsyncAssignment: ...

    @property
    def has_moved(self) -> bool: ...

    def is_over(self) -> bool: ...

    def part(self, epoch: Epoch) -> Part: ...

    def begin(self) -> tuple[Array, int]: ...

    def end(self, checksums: Array) -> bool: ...


class PlainRounds:
    """The rounds of worker `rank` in a job that always has the same workers."""

    has_moved = False

    def __init__(self, assignment: SyncAssignment, rank: int) -> None:
        self._assignment, self._rank = assignment, rank

    @property
    def assignment(self) -> SyncAssignment:
        return self._assignment

    def is_over(self) -> bool:
        return self.assignment.finished

    def part(self, epoch: Epoch) -> Part:
        return self.assignment.part(self._rank, epoch)

    def begin(self) -> tuple[Array, int]:
        return self.assignment.positions_of(self._rank), self.assignment.round.size

    def end(self, checksums: Array) -> bool:
        self.assignment.committed(self.assignment.members)
        return False
