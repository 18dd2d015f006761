"""A change of the job's kvstore that the user asks for. Pure.

`Request` is what all jobs have in common: one change at a time, why it is refused, and the answers. A job that is not
elastic changes between two steps, on all workers at once (`AfterStep`); an elastic one with a view
(membership/kind_change.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dmltrain.kvstore.scheduler.actions import Action, Log, Send
from dmltrain.kvstore.scheduler.reports import ASKED, MADE, REFUSED, Told
from dmltrain.kvstore.transport.message import CANCELLED, Change, Changed, Stops

STARTING = "the job is still starting: try again when it trains"
ENDING = "the job is ending"


@dataclass
class Request:
    """`change`: the one that is not made yet. Until it is, another one is refused."""

    change: Change | None = None

    def ask(self, change: Change, starts: bool, ends: bool, refusal: Callable[[], str] = str) -> list[Log]:
        """The user wants this change; from now on it is `change`, unless it is refused. `starts`, `ends`: the job does.
        `refusal()`: why its kvstore cannot change so; empty if it can."""
        asked = Log(f"change {change.number} is asked for by {change.by}", Told(change.number, ASKED))
        busy = f"change {self.change.number} is not made yet: wait for it" if self.change else ""
        why = (starts and STARTING) or (ends and ENDING) or busy or refusal()
        if why:
            return [asked, _refused(change, why)]
        self.change = change
        return [asked]

    def refuse(self, why: str) -> list[Log]:
        """Drop the change, if there is one."""
        change, self.change = self.change, None
        return [_refused(change, why)] if change else []

    def made(self, now: str, where: str, of: str = "") -> list[Log]:
        """The change is made: the kvstore is `now` so since `where`."""
        change, self.change = self.change, None
        assert change is not None
        return [Log(f"change {change.number} {where}{of}: {now}", Told(change.number, MADE, now, where))]


@dataclass
class AfterStep:
    """A change after a step of all `workers` workers.

    The scheduler asks each worker after which step it can stop. The worker names its present or next step, and makes no
    further step before the scheduler decides. All workers change after the latest of the named steps: all make the same
    number of steps, so all reach it. worker/changes.py has what they do there. If a worker refuses, or finishes,
    nothing changes.
    """

    workers: int
    _request: Request = field(default_factory=Request)
    _steps: dict[int, int] = field(default_factory=dict)  # by worker: after which it can change
    _made: set[int] = field(default_factory=set)  # workers that have changed

    def ask(self, change: Change, starts: bool, ends: bool) -> list[Action]:
        """The user wants this change; see Request."""
        answers = self._request.ask(change, starts, ends)
        if self._request.change is not change:
            return [*answers]
        self._steps, self._made = {}, set()
        return [*answers, *self._tell(change)]

    def take(self, worker: int, message: Stops | Changed) -> list[Action]:
        """A worker's message about the change. Messages about another change are ignored."""
        change = self._request.change
        if change is None or message.number != change.number:
            return []
        if isinstance(message, Changed):
            self._made.add(worker)
            where = f"after step {change.after}"
            return (
                [*self._request.made(message.now, where, " of all workers")] if len(self._made) == self.workers else []
            )
        if message.refusal:
            return self._cancel(change, message.refusal)
        self._steps[worker] = message.step
        if len(self._steps) < self.workers:
            return []
        self._request.change = replace(change, after=max(self._steps.values()))
        return self._tell(self._request.change)

    def left(self, worker: int) -> list[Action]:
        """A worker has finished, and makes no more steps."""
        change = self._request.change
        return self._cancel(change, ENDING) if change and worker not in self._made else []

    def _cancel(self, change: Change, why: str) -> list[Action]:
        return [*self._tell(replace(change, after=CANCELLED)), *self._request.refuse(why)]

    def _tell(self, change: Change) -> list[Action]:
        return [Send(("worker", worker), change) for worker in range(self.workers)]


def _refused(change: Change, why: str) -> Log:
    return Log(f"change {change.number} is refused: {why}", Told(change.number, REFUSED, why))
