"""Members that leave an elastic job on purpose, and a job that has too few of them. Pure.

A member that gives notice stays until the leader's next op is a round of training. Then all members are between two
rounds, and the next view is without this member. Only at such a moment can the job also wait for more workers, in a
view in which the members do nothing, or end: then the members save a checkpoint in their last view.

A member may leave only if one stays that has the state of training. Newcomers do not have it yet. So if only newcomers
would be left, they join first, and the others leave one view later.

A member with residuals of a compression hands them over first. That is the only op of one more view, in which it still
is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dmltrain.kvstore.transport.message.views import Enter


@dataclass(frozen=True)
class Decision:
    """What comes with the next view, apart from losses. `leaves`: member -> reason. `admits`: whether the workers that
    wait join. `holds`: whether all members only wait in this view. `ends`: why the job ends with it, or empty.
    `hands_over`: the members that hand over residuals in it, and leave one view later."""

    leaves: dict[int, str] = field(default_factory=dict)
    admits: bool = True
    holds: bool = False
    ends: str = ""
    hands_over: tuple[int, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether members train in it."""
        return not (self.holds or self.ends or self.hands_over)


@dataclass
class Departures:
    """`minimum`: of workers. `patience`: s, for which a job with fewer waits for more; 0: it ends at once."""

    minimum: int
    patience: float = 0.0
    notices: dict[int, str] = field(default_factory=dict)  # of members that have not left: why they leave
    residuals: set[int] = field(default_factory=set)  # of these those with residuals that nobody else has
    gone: set[int] = field(default_factory=set)  # that have left, or leave with the next view, without a replacement
    holding: bool = False  # all members wait between two rounds
    ends: str = ""  # why the job ends: it is in its last view
    since: float | None = None  # s, when it began to have too few

    def notice(self, member: int, reason: str, residuals: bool) -> None:
        """A member gives notice, with residuals or without."""
        self.notices[member] = reason
        if residuals:
            self.residuals.add(member)

    def forget(self, member: int) -> None:
        """A member has left, or was lost, or has come to its end."""
        self.notices.pop(member, None)
        self.residuals.discard(member)

    @property
    def wanted(self) -> bool:
        """Whether a moment between two rounds is needed."""
        return bool(self.notices) or self.since is not None

    def too_few(self, count: int) -> str:
        """Why the job cannot go on after a loss with `count` workers, or empty."""
        if count and (count >= self.minimum or self.patience or self.ends):
            return ""
        left = "no worker is left" if not count else f"{count} worker{'s are' if count > 1 else ' is'} left"
        return f"{left}, and --min-workers is {self.minimum}"

    def resume(self, entered: Enter) -> None:
        """Take over from a lost scheduler, in the view of this message."""
        self.gone, self.holding, self.ends = set(entered.departed), entered.holds, entered.ends

    def begin(self, decision: Decision, count: int, now: float) -> list[str]:
        """A view begins with this decision, and with `count` workers. Returns the texts for the log."""
        for member in decision.leaves:
            self.forget(member)
        self.gone |= decision.leaves.keys()
        ending = f"the job ends: {decision.ends}" if decision.ends and not self.ends else ""
        self.holding, self.ends = decision.holds, decision.ends
        return [text for text in (ending, self._observe(count, now)) if text]

    def _observe(self, count: int, now: float) -> str:
        if count >= self.minimum or not self.patience or self.ends:
            self.since = None
            return ""
        if self.since is not None:
            return ""
        self.since = now
        return f"{self._few(count)}: the job waits up to {self.patience:g} s for more (--wait-for-hosts)"

    def overdue(self, now: float) -> bool:
        """Whether the members have waited for more workers for long enough."""
        return self.holding and self.since is not None and now - self.since >= self.patience

    def enough(self, count: int) -> bool:
        """Whether a job whose members wait can go on with `count` workers."""
        return count >= self.minimum

    def decide(self, present: Collection[int], coming: int, now: float) -> Decision:
        """Decide what comes next, while all members are between two rounds. `present`: the members that are left;
        `coming`: how many workers would join them."""
        decision = self._decide(present, coming, now)
        if not (hands_over := self.residuals & decision.leaves.keys()):
            return decision
        leaves = {member: reason for member, reason in decision.leaves.items() if member not in hands_over}
        return replace(decision, leaves=leaves, holds=False, hands_over=tuple(sorted(hands_over)))

    def _decide(self, present: Collection[int], coming: int, now: float) -> Decision:
        leaves = {member: reason for member, reason in self.notices.items() if member in present}
        count = len(present) - len(leaves) + coming
        if len(leaves) == len(present):
            return Decision() if coming else Decision(admits=False, ends=self._last(leaves, "no worker is left"))
        if count >= self.minimum:
            return Decision(leaves)
        if not self.patience:
            return Decision(admits=False, ends=self._last(leaves, self._few(count)))
        if self.since is not None and now - self.since >= self.patience:
            return Decision(
                admits=False,
                ends=f"{self._few(count)}: no more have come within {now - self.since:.0f} s (--wait-for-hosts)",
            )
        return Decision(leaves, admits=False, holds=True)

    def _few(self, count: int) -> str:
        return f"{count} worker{' is' if count == 1 else 's are'} left, and --min-workers is {self.minimum}"

    def _last(self, leaves: dict[int, str], left: str) -> str:
        """Why the job ends with these notices."""
        names = "; ".join(f"worker {member} leaves on purpose: {reason}" for member, reason in sorted(leaves.items()))
        return f"{names}; {left}" if names else left
