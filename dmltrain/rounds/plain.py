"""The rounds of an epoch in a job that is not elastic. rounds/member_rounds.py has those of one that is."""

from __future__ import annotations

from typing import Protocol

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_deal import AsyncDealing
from dmltrain.data.assignment.deal import Dealing
from dmltrain.data.assignment.parts import Epoch, Part


class Rounds(Protocol):
    """See rounds/member_rounds.py."""

    @property
    def dealing(self) -> Dealing | AsyncDealing: ...

    @property
    def has_moved(self) -> bool: ...

    def is_over(self) -> bool: ...

    def part(self, epoch: Epoch) -> Part: ...

    def begin(self) -> tuple[Array, int]: ...

    def end(self, checksums: Array) -> bool: ...


class PlainRounds:
    """The rounds of worker `rank` in a job that always has the same workers."""

    has_moved = False

    def __init__(self, dealing: Dealing, rank: int) -> None:
        self._dealing, self._rank = dealing, rank

    @property
    def dealing(self) -> Dealing:
        return self._dealing

    def is_over(self) -> bool:
        return self.dealing.finished

    def part(self, epoch: Epoch) -> Part:
        return self.dealing.part(self._rank, epoch)

    def begin(self) -> tuple[Array, int]:
        return self.dealing.positions_of(self._rank), self.dealing.round.dealt

    def end(self, checksums: Array) -> bool:
        self.dealing.committed(self.dealing.members)
        return False
