"""Which op each member of an elastic job holds, as the members report it. Pure; views.py says how that decides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

NOTHING = -1  # permission of a flush


@dataclass
class Flushing:
    """`active`: whether a change of view has begun and has not ended. `reports`: member -> the last op that it holds,
    as it has reported in this turn, or at the planned end of a view. `permitted`: the members that may recognise the
    target."""

    active: bool = False
    turn: int = 0
    reports: dict[int, int] = field(default_factory=dict)
    permitted: set[int] = field(default_factory=set)

    def begin_turn(self) -> None:
        """Ask all members again. Earlier permissions are void."""
        self.active = True
        self.turn += 1
        self.reports.clear()
        self.permitted.clear()

    def end(self) -> None:
        """The next view begins."""
        self.active, self.turn = False, 0
        self.reports.clear()
        self.permitted.clear()

    def expects(self, turn: int) -> bool:
        """Whether a report of this turn counts. Turn 0: the report at the planned end of a view, sent unasked."""
        return turn == (self.turn if self.active else 0)

    def complete(self, members: Collection[int]) -> bool:
        """Whether all of these have reported."""
        return set(members) <= self.reports.keys()

    def highest(self, members: Collection[int]) -> int:
        """The last op that one of these members holds, as far as is known."""
        return max((done for member, done in self.reports.items() if member in members), default=0)

    def behind(self, members: Collection[int], op: int) -> set[int]:
        """The members that do not hold this op, as far as is known."""
        return {member for member in members if self.reports.get(member, NOTHING) < op}

    def permit(self, members: set[int]) -> list[int]:
        """Permit these members to recognise the target. Returns those that have not been told yet."""
        new = sorted(members - self.permitted)
        self.permitted |= members
        return new
