"""The supervisor of a job. Pure: events and the time in, actions out; session.py does the I/O.

Each kind of event goes to the part that decides about it: the start of the job (supervisor/startup.py), the ends and
losses of its processes (supervisor/recovery.py), its planned changes (planned/changes.py). The end is the same for all
hosts (supervisor/ending.py).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dmltrain_launch.agent import events
from dmltrain_launch.agent.commands import Stop
from dmltrain_launch.channels.exit_text import signal_name
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.run.planned.changes import Changes
from dmltrain_launch.run.supervisor.action import Action, Connect, Send
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.cause import Cause
from dmltrain_launch.run.supervisor.event import (
    Connected,
    Copied,
    Event,
    Interrupted,
    Lost,
    OutputFailed,
    Quiet,
    Tick,
    Unreached,
)
from dmltrain_launch.run.supervisor.limit import (
    FAULT_CODE,
    RECONNECT_ATTEMPTS,
    RECONNECT_LOST_SECONDS,
    RECONNECT_SECONDS,
    TIMEOUT_CODE,
    UNLIMITED,
    Limits,
)
from dmltrain_launch.run.supervisor.policy import END, Policy
from dmltrain_launch.run.supervisor.recovery import Recovery
from dmltrain_launch.run.supervisor.startup import Startup


class Supervisor(Attempt):
    """One attempt. Call `handle` for each event and do its actions until `over`; Tick at `deadline`."""

    def __init__(
        self, job: Job, hosts: Sequence[Host], limits: Limits = UNLIMITED, policy: Policy = END, check: bool = False
    ):
        super().__init__(job, hosts, limits, policy, check)
        self.startup, self.recovery, self.changes = Startup(self), Recovery(self), Changes(self)

    @property
    def deadline(self) -> float:
        return min(super().deadline, self.changes.deadline)

    def begin(self, key: str, log_folder: str | None, now: float, certificate: str = "") -> list[Action]:
        """The first actions. `key` and `certificate` (PEM, with its private key) are sent to the agents only."""
        return self.startup.begin(key, certificate, log_folder, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Update the state. Returns the actions that the event requires."""
        if self.changes.arrivals.is_unwanted(event):
            return [*self.changes.arrivals.unwanted(event), *self.changes.settle(now)]
        event = event.report if isinstance(event, events.Reported) else event
        if self.succession.awaits(event) and not self.ending.begun:
            actions = self.recovery.next_scheduler(event, now)
        elif (changed := self.changes.handle(event, now)) is not None:
            actions = changed
        else:
            actions = self._handle(event, now)
        return [*actions, *self.changes.after(event, now), *self.changes.settle(now)]

    def _handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Connected(host):
                return self.startup.connected(host, now)
            case Copied() | events.Ready() | events.Probed() | events.Bound() | events.Reached() | events.Measured():
                return self.startup.prepared(event, now)
            case Unreached():
                return self.startup.unreached(event, now)
            case events.Refused():
                return self._refused(event, now)
            case events.Started():
                self.startup.started(event)
            case events.Exited():
                return self.recovery.exited(self.processes[event.task], event.code, now)
            case events.Frozen():
                return self.recovery.frozen(event, now)
            case events.Stopped():
                self._note_stopped(event)
            case events.Ended(host, left):
                self.ending.left[host] = left
            case Quiet(host, seconds):
                if not self.ending.is_being_replaced(host):
                    self.verdict.silent[host] = seconds
            case Lost():
                return self._lost(event, now)
            case Interrupted(number):
                return self._interrupted(number, now)
            case OutputFailed(message):
                return self.fail(Cause(FAULT_CODE, message), now)
            case Tick():
                return self._tick(now)
        return []

    def _refused(self, event: events.Refused, now: float) -> list[Action]:
        host, cause = event.host, Cause(event.code, event.message)
        if host in self.ending.given_up:
            return []
        if (actions := self.recovery.not_started(event, now)) is not None:
            return actions
        if not self.ending.begun and self.recovery.can_lose(host):
            return [Send(host, Stop(self.limits.grace)), *self.recovery.lose_host(host, cause, now)]
        return self.startup.refused(host, cause, now)

    def _lost(self, event: Lost, now: float) -> list[Action]:
        host = event.host
        if self.ending.has_ended(host):
            return []  # the agent had finished
        if self.ending.is_being_replaced(host):
            self.ending.left[host] = None
            return []
        agent = self.preparation.agents.get(host)
        pid = f" (pid {agent.pid})" if agent else ""
        seconds, attempts = (RECONNECT_SECONDS, RECONNECT_ATTEMPTS) if event.ended else (RECONNECT_LOST_SECONDS, 1)
        connect = Connect(host, seconds, attempts)
        self.ending.replace(host, now, seconds)
        cause = Cause(FAULT_CODE, f"the agent on {host}{pid} {event.reason}")
        if host in self.ending.given_up:
            return [connect]
        goes_on = not self.ending.begun and self.recovery.can_lose(host)
        return [connect, *(self.recovery.lose_host(host, cause, now) if goes_on else self.fail(cause, now))]

    def _note_stopped(self, event: events.Stopped) -> None:
        for pid, task in event.processes:
            label = self.tasks.label_of(pid, task, event.host)
            self.ending.stopped.append(label)
            if task is not None and self.cause is None and not self.processes[task].lost:
                # no other cause: this process kept the job from ending
                text = f"{label} did not end: it is stopped"
                self.verdict.cause = Cause(128 + signal.SIGSTOP, text, self.processes[task])

    def _interrupted(self, number: int, now: float) -> list[Action]:
        self.interrupted = True
        if not self.ending.begun:
            return self.fail(Cause(128 + number, f"the launcher got {signal_name(number)}"), now)
        self.ending.grace = 0.0
        return self.end(now)

    def _tick(self, now: float) -> list[Action]:
        if now >= self.ending.give_up_at:
            lost = [Lost(name, "did not end the job in time") for name in self.ending.unanswered(self.hosts)]
            return [action for lost_agent in lost for action in self._lost(lost_agent, now)]
        if now >= self.timeout_at:
            text = f"the job took more than {self.limits.timeout:g} s; not ended: {self.tasks.running}"
            return self.fail(Cause(TIMEOUT_CODE, text), now, dump=True)
        if now >= self.start_at:
            return self.startup.late(now)
        if now >= self.verdict.together_at:
            return self.fail(self.verdict.first_fault(self.hosts), now)
        if self.verdict.suspect and now >= self.verdict.suspect_at:
            return self.recovery.decide(self.verdict.suspect, now)
        if now >= self.finish_at:
            return self.end(now)
        return self.replacer.start(self.starter, self.hosts, now)
