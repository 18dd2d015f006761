"""Which op each member of an elastic job holds, as the members report it. Pure; views.py says how that decides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

NOTHING = -1  # permission of a flush


@dataclass
class Flushing:
    """`active`: whether a change of view has begun and has not ended. `reports`: member -> the last op that it holds,
    as it has said in this turn, or at the planned end of a view. `permitted`: who has been let recognise the target."""

    active: bool = False
    turn: int = 0
    reports: dict[int, int] = field(default_factory=dict)
    permitted: set[int] = field(default_factory=set)

    def begin_turn(self) -> None:
        """All are asked anew. What was permitted before is no longer."""
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
        """Whether a report of this turn counts. Turn 0: the planned end of a view, which nobody has asked for."""
        return turn == (self.turn if self.active else 0)

    def complete(self, members: Collection[int]) -> bool:
        """Whether all of these have reported."""
        return set(members) <= self.reports.keys()

    def highest(self, members: Collection[int]) -> int:
        """The last op that any of these holds, as far as is known."""
        return max((done for member, done in self.reports.items() if member in members), default=0)

    def behind(self, members: Collection[int], op: int) -> set[int]:
        """Which of these do not hold this op, as far as is known."""
        return {member for member in members if self.reports.get(member, NOTHING) < op}

    def permit(self, members: set[int]) -> list[int]:
        """Let these recognise the target. Returns who has not been told yet."""
        new = sorted(members - self.permitted)
        self.permitted |= members
        return new
