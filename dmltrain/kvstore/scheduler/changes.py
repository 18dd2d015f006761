"""A change of the job's kvstore between two steps, on all workers at once. Pure.

The scheduler asks each worker after which step it can stop. The worker names its present or next step, and makes no
further step before the scheduler decides. All workers change after the latest of the named steps: all make the same
number of steps, so all reach it. worker/changes.py has what they do there. If a worker refuses, or finishes, nothing
changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dmltrain.kvstore.scheduler.actions import Action, Log, Send
from dmltrain.kvstore.scheduler.reports import ASKED, MADE, REFUSED, Told
from dmltrain.kvstore.transport.message import CANCELLED, Change, Changed, Stops

STARTING = "the job is still starting: try again when it trains"
ENDING = "the job is ending"


@dataclass
class Changes:
    """The changes of a job with `workers` workers. One change at a time: another one is refused until all workers have
    made this one."""

    workers: int
    _change: Change | None = None
    _steps: dict[int, int] = field(default_factory=dict)  # by worker: after which it can change
    _made: set[int] = field(default_factory=set)  # workers that have changed

    def ask(self, change: Change, registered: bool, finished: Collection[int]) -> list[Action]:
        """The user wants this change."""
        busy = f"change {self._change.number} is not made yet: wait for it" if self._change else ""
        why = (not registered and STARTING) or (finished and ENDING) or busy
        if why:
            return [asked(change), refused(change.number, str(why))]
        self._change, self._steps, self._made = change, {}, set()
        return [asked(change), *self._tell(change)]

    def take(self, worker: int, message: Stops | Changed) -> list[Action]:
        """A worker's message about the change. Messages about another change are ignored."""
        change = self._change
        if change is None or message.number != change.number:
            return []
        if isinstance(message, Changed):
            return self._changed(worker, change, message)
        if message.refusal:
            return self._cancel(change, message.refusal)
        self._steps[worker] = message.step
        if len(self._steps) < self.workers:
            return []
        self._change = replace(change, after=max(self._steps.values()))
        return self._tell(self._change)

    def left(self, worker: int) -> list[Action]:
        """A worker has finished, and makes no more steps."""
        return self._cancel(self._change, ENDING) if self._change and worker not in self._made else []

    def _changed(self, worker: int, change: Change, message: Changed) -> list[Action]:
        self._made.add(worker)
        if len(self._made) < self.workers:
            return []
        self._change = None
        text = f"change {change.number} after step {change.after} of all workers: {message.now}"
        return [Log(text, Told(change.number, MADE, message.now, f"after step {change.after}"))]

    def _cancel(self, change: Change, why: str) -> list[Action]:
        self._change = None
        return [*self._tell(replace(change, after=CANCELLED)), refused(change.number, why)]

    def _tell(self, change: Change) -> list[Action]:
        return [Send(("worker", worker), change) for worker in range(self.workers)]


def asked(change: Change) -> Log:
    return Log(f"change {change.number} is asked for by {change.by}", Told(change.number, ASKED))


def refused(number: int, why: str) -> Log:
    return Log(f"change {number} is refused: {why}", Told(number, REFUSED, why))
