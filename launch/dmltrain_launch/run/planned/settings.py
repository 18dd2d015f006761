"""Changes of the kvstore of a running job, which the user asks for with `dmltrain job set` or by rules. Pure.

The agent on the scheduler's host tells the scheduler what the user wants. The scheduler reports what becomes of it.
One change is made at a time; the next request waits.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from dmltrain.base import json_text
from dmltrain_launch.agent.commands import Tell
from dmltrain_launch.agent.reports import ASKED, REFUSED, Slowest, Told
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.job.rule import Rule
from dmltrain_launch.job.settings import Settings, parse
from dmltrain_launch.run.planned.waiters import Waiter, Waiters
from dmltrain_launch.run.supervisor.action import Action, Send
from dmltrain_launch.run.supervisor.attempt import Attempt, KVStoreChange
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, USAGE_CODE

READ_SECONDS = 10.0  # for the scheduler to read what is asked for
SILENT = (
    f"the job's scheduler has not answered within {READ_SECONDS:g} s: only jobs with dmltrain's own kvstore can "
    "change, not those with --backend mxnet, nor programs without dmltrain"
)


LOST = "the job's scheduler was lost meanwhile: see in the log of worker 0 if the kvstore changed; if not, ask again"
NONE = "the job's scheduler is being started again: ask again in a few seconds"


@dataclass(frozen=True)
class _Wanted:
    number: int
    settings: Settings
    by: str
    of_rule: bool


class SettingsChanges:
    """`deadline`: when something is due. Call `tick` then."""

    def __init__(self, attempt: Attempt, waiters: Waiters):
        self._attempt, self._waiters = attempt, waiters
        self._number = 0
        self._applied: Rule | None = None  # the last rule that held
        self._queue: deque[_Wanted] = deque()  # the first one is being made
        self.deadline = math.inf

    def ask(self, text: str, waiter: Waiter, by: str, now: float) -> list[Action]:
        """LaunchError if no job can have these settings."""
        settings = parse(text)
        waiter.keys.add(("change", self._number + 1))
        return self._add(settings, by, False, now)

    def slowest(self, event: Slowest, now: float) -> list[Action]:
        """Apply the first rule of the job that holds, unless it was also the last one that was applied."""
        if self._attempt.unready:
            return []
        rule = next((rule for rule in self._attempt.job.rules if rule.holds(event.percent)), None)
        if rule is None or rule is self._applied:
            return []
        self._applied = rule
        by = f"the rule {rule.text!r}: worker {event.rank} computes {event.percent:g} % longer than the median"
        return self._add(rule.settings, by, True, now)

    def _add(self, settings: Settings, by: str, of_rule: bool, now: float) -> list[Action]:
        self._number += 1
        self._queue.append(_Wanted(self._number, settings, by, of_rule))
        return self._begin(now) if len(self._queue) == 1 else []

    def told(self, event: Told, after: float, now: float) -> list[Action]:
        """The scheduler says what becomes of a change, `after` s from the job's start."""
        if not self._queue or self._queue[0].number != event.number:
            return []
        self.deadline = math.inf
        if event.outcome == ASKED:
            return []
        if event.outcome == REFUSED:
            return self._refused(event.text, USAGE_CODE, now)
        change = KVStoreChange(after, event.text, self._queue[0].by, event.where)
        self._attempt.kvstore_changes.append(change)
        self._attempt.announce(f"{change.text}; asked for by {change.by}")
        return self._settle(change.text, 0, now)

    def tick(self, now: float) -> list[Action]:
        return self._refused(SILENT, FAULT_CODE, now) if now >= self.deadline else []

    def scheduler_lost(self, now: float) -> list[Action]:
        """The scheduler is lost, and the next one does not know the change that was asked for: refuse it."""
        return self._refused(LOST, FAULT_CODE, now) if self._queue else []

    def _refused(self, text: str, code: int, now: float) -> list[Action]:
        wanted = self._queue[0]
        if wanted.of_rule:
            self._attempt.announce(f"kvstore not changed: {text}; asked for by {wanted.by}")
            if code == FAULT_CODE:  # the job did not refuse: try again while the rule holds
                self._applied = None
        return self._settle(text, code, now)

    def _settle(self, text: str, code: int, now: float) -> list[Action]:
        self._waiters.settle(("change", self._queue.popleft().number), text, code)
        self.deadline = math.inf
        return self._begin(now) if self._queue else []

    def _begin(self, now: float) -> list[Action]:
        wanted = self._queue[0]
        for task, process in enumerate(self._attempt.processes):
            if process.task.role == SCHEDULER and process.pid and process.runs:
                self.deadline = now + READ_SECONDS
                message = request(wanted.number, wanted.settings, wanted.by)
                return [Send(process.task.host.name, Tell(task, message))]
        return self._refused(NONE, FAULT_CODE, now)


def request(number: int, settings: Settings, by: str) -> str:
    """The scheduler's message `change`, see docs/protocol.md."""
    return json_text.encode({"op": "change", "number": number, **vars(settings), "by": by, "after": 0}).decode()
