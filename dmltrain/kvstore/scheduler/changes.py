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
from dmltrain.kvstore.transport.message.changes import CANCELLED, Change, Changed, Stops
from dmltrain.kvstore.transport.message.job import Release

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
    number of steps, so all reach it. worker/changes.py has what they do there. When all wait at the barrier of the
    change, the servers change, and then all go on. If a worker refuses, or finishes, nothing changes.
    """

    workers: int
    servers: int
    _request: Request = field(default_factory=Request)
    _steps: dict[int, int] = field(default_factory=dict)  # by worker: after which it can change
    _made: set[int] = field(default_factory=set)  # servers that have changed

    def ask(self, change: Change, starts: bool, ends: bool) -> list[Action]:
        """The user wants this change; see Request."""
        answers = self._request.ask(change, starts, ends)
        if self._request.change is not change:
            return [*answers]
        self._steps, self._made = {}, set()
        return [*answers, *self._send(change)]

    def stops(self, worker: int, message: Stops) -> list[Action]:
        """A worker says when it can change. What it says about another change is ignored."""
        change = self._request.change
        if change is None or message.number != change.number:
            return []
        if message.refusal:
            return self._cancel(change, message.refusal)
        self._steps[worker] = message.step
        if len(self._steps) < self.workers:
            return []
        self._request.change = replace(change, after=max(self._steps.values()))
        return self._send(self._request.change)

    def met(self, barrier: str) -> list[Action]:
        """All workers have reached this barrier: they are released at once, or, if they have settled for the change,
        when the servers have changed."""
        change = self._request.change
        if change is None or barrier != change.barrier:
            return self._send(Release(barrier))
        return [Send(("server", number), change) for number in range(self.servers)]

    def changed(self, server: int, message: Changed) -> list[Action]:
        """A server has changed."""
        change = self._request.change
        if change is None or message.number != change.number:
            return []
        self._made.add(server)
        if len(self._made) < self.servers:
            return []
        made = self._request.made(message.now, f"after step {change.after}", " of all workers")
        return [*self._send(Release(change.barrier)), *made]

    def left(self) -> list[Action]:
        """A worker has finished, and makes no more steps."""
        return self._cancel(self._request.change, ENDING) if self._request.change else []

    def _cancel(self, change: Change, why: str) -> list[Action]:
        return [*self._send(replace(change, after=CANCELLED)), *self._request.refuse(why)]

    def _send(self, message: Change | Release) -> list[Action]:
        return [Send(("worker", worker), message) for worker in range(self.workers)]


def _refused(change: Change, why: str) -> Log:
    return Log(f"change {change.number} is refused: {why}", Told(change.number, REFUSED, why))
