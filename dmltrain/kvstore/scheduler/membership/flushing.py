"""Which op each member of an elastic job holds, as the members report it. Pure; views.py says how that decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmltrain.kvstore.scheduler.membership.roster import Roster

NOTHING = -1  # permission of a flush


@dataclass
class Flushing:
    """`active`: whether a change of view has begun and has not ended. `reports`: member -> the last op that it holds,
    as it has reported in this turn, or at the planned end of a view. `permitted`: the members that may recognise the
    target."""

    roster: Roster
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

    @property
    def complete(self) -> bool:
        """Whether all present members have reported."""
        return self.roster.present <= self.reports.keys()

    @property
    def target(self) -> int:
        """The last op that any present or finished member holds, as far as is known."""
        base = self.roster.view.base if self.roster.view else 0
        held = (done for member, done in self.reports.items() if member in self.roster.present)
        return max([base, *held, *self.roster.finished.values()])

    @property
    def behind(self) -> set[int]:
        """The present members that do not hold the target, as far as is known."""
        target = self.target
        return {member for member in self.roster.present if self.reports.get(member, NOTHING) < target}

    def permit(self, members: set[int]) -> list[int]:
        """Permit these members to recognise the target. Returns those that have not been told yet."""
        new = sorted(members - self.permitted)
        self.permitted |= members
        return new
