"""How the scheduler ends its job, and which lost links may be the cause. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dmltrain.kvstore.scheduler.actions import ALL, Action, Finish, Send
from dmltrain.kvstore.scheduler.lost_links import LostLinks
from dmltrain.kvstore.transport.message.job import Abort, LinkLost, Shutdown


@dataclass
class Ending:
    """`counts`: whether a lost link means anything for the processes that the job has now. `finished`: the job has
    ended, or another scheduler decides."""

    counts: Callable[[LinkLost], bool]
    links: LostLinks = field(default_factory=LostLinks)
    finished: bool = False

    @property
    def causes(self) -> LostLinks:
        """The lost links that still count. Those with an end that has left the job since are forgotten."""
        self.links.keep(self.counts)
        return self.links

    def end(self) -> list[Action]:
        """The job has come to its end."""
        self.finished = True
        return [Send(ALL, Shutdown()), Finish()]

    def abort(self, reason: str, better: bool = False) -> list[Action]:
        """End the job. `better`: whether `reason` is a better cause than a lost link, if one was reported."""
        self.finished = True
        if self.causes and not better:
            reason = str(self.causes.cause)
        return [Send(ALL, Abort(reason)), Finish(reason)]
