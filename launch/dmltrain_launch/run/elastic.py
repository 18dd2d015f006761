"""The supervisor of an elastic job, which also changes while it runs: workers come, and leave on purpose. Pure.

Events of planned changes go to changes.py, all others to the supervisor of any job (supervise.py). When the scheduler
is lost, the job gets the next incarnation of it (succession.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dmltrain_launch.agent import events
from dmltrain_launch.agent.reports import Leaves, Slowest, Told, Viewed
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.run.planned.changes import Changes
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.cause import Cause
from dmltrain_launch.run.supervisor.event import (
    Asked,
    Connected,
    Copied,
    Event,
    Listed,
    Lost,
    Tick,
    Unlisted,
    Unreached,
)
from dmltrain_launch.run.supervisor.limit import UNLIMITED, Limits, as_shell
from dmltrain_launch.run.supervisor.losses import Announcement
from dmltrain_launch.run.supervisor.process import Process
from dmltrain_launch.run.supervisor.succession import Succession
from dmltrain_launch.run.supervisor.supervise import Supervisor

PREPARED = (Copied, events.Ready, events.Probed, events.Bound, events.Reached)


class ElasticSupervisor(Supervisor):
    """See `Supervisor`. `changes` has the planned changes.

    `listed`: hosts that the user has described, also those without a process. `watched`: whether the job follows
    changes of the file that lists them.
    """

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        limits: Limits = UNLIMITED,
        listed: Sequence[Host] = (),
        watched: bool = False,
    ):
        super().__init__(job, hosts, limits)
        self.changes = Changes(self, listed, watched)
        self.succession = Succession(job)

    @property
    def deadline(self) -> float:
        return min(super().deadline, self.changes.deadline)

    def handle(self, event: Event, now: float) -> list[Action]:
        if self.changes.arrivals.is_unwanted(event):
            return [*self.changes.arrivals.unwanted(event), *self.changes.settle(now)]
        event = event.report if isinstance(event, events.Reported) else event
        changed = self._change(event, now)
        actions = super().handle(event, now) if changed is None else changed
        return [*actions, *self._after(event, now), *self.changes.settle(now)]

    def _change(self, event: Event, now: float) -> list[Action] | None:
        """The actions for an event of a planned change; None if the event is not about one."""
        changes, arrivals = self.changes, self.changes.arrivals
        match event:
            case Asked():
                return changes.asked(event, now)
            case Told():
                return changes.settings.told(event, now - self._began, now)
            case Slowest():
                return changes.settings.slowest(event, now)
            case Viewed():
                changes.viewed(event, now - self._began)
                return [] if self.ending.begun else changes.listing.retry(now)
            case Leaves():
                changes.leavers.leaving(event.rank, event.reason)
                return []
            case Listed(hosts):
                changes.listing.wanted = hosts
                return []
            case Unlisted(message):
                self.losses.announcements.append(Announcement(f"{message}; the job goes on with the hosts that it has"))
                return []
            case events.Noticed(host, tasks):
                changes.leavers.noticed(host, tasks, now)
                return []
        if self.ending.begun:
            return None
        match event:
            case events.Bound(host, ports) if host == self.succession.binding and "scheduler" in ports:
                return self.succession.bound(event, self.tasks, self._followers)
            case events.Refused(host, message, code) if host == self.succession.binding:
                return self._fail(Cause(code, f"the scheduler cannot be started again: {message}"), now)
            case Unreached(host, message, code) | events.Refused(host, message, code) if arrivals.is_coming(host):
                return arrivals.failed(host, message, code)
            case Lost(host, reason) if arrivals.is_coming(host):
                return arrivals.lost(host, f"its agent {reason}")
            case Connected(host):
                arrivals.connected(host)
        if isinstance(event, PREPARED) and self.preparation.done:
            return [] if self.ending.is_being_replaced(event.host) else arrivals.prepared(event)
        return None

    def _after(self, event: Event, now: float) -> list[Action]:
        """What an event means for planned changes, in addition to what it means for any job."""
        match event:
            case events.Exited(_, task) if self.processes[task].left:
                self.changes.leavers.left(self.processes[task], now - self._began)
            case events.Exited(_, task) if self.processes[task].left_with_host:
                self.processes[task].left_after = now - self._began
            case Lost(host) | Unreached(host) if self.ending.has_ended(host):
                self.ending.closed.add(host)
            case Lost(host):
                return self.changes.arrivals.peer_lost(host)
            case Tick():
                return self.changes.tick(now)
        return []

    # -- the scheduler -------------------------------------------------------------------------------------------

    @property
    def _followers(self) -> list[Host]:
        """The hosts whose processes must know where the scheduler is: also hosts whose workers are leaving."""
        leave = {
            process.task.host.name
            for process in self.processes
            if process.runs and self.ending.has_agent(process.task.host.name)
        }
        return [host for name, host in self.hosts.items() if self.ending.is_usable(name) or name in leave]

    def _exited(self, process: Process, code: int, now: float) -> list[Action]:
        if self.ending.begun or process.lost or not self.succession.is_needed_after(process, code, self.tasks):
            return super()._exited(process, code, now)
        process.code = code
        return self._lose([process], Cause(as_shell(code), process.fate, process), now)

    def _can_lose(self, host: str) -> bool:
        running = [process for process in self.tasks.on(host) if process.runs]
        others = [process for process in self.tasks.on(host) if process.task.role != SCHEDULER]
        if not self.losses.allow(others, self.tasks):
            return False
        if not (can := self.succession.can_lose(running)):
            self.losses.announcements.append(Announcement(self.succession.refusal))
        return can

    def _stays_stopped(self, process: Process, cause: Cause, now: float) -> list[Action]:
        """A stopped scheduler counts as lost. When it runs again, it finds that another one has taken its place."""
        if process.task.role != SCHEDULER or not self.tasks.started:
            return super()._stays_stopped(process, cause, now)
        return self._lose([process], cause, now)

    def _lose(self, lost: Sequence[Process], cause: Cause, now: float) -> list[Action]:
        schedulers = [process for process in lost if process.task.role == SCHEDULER]
        others = [process for process in lost if process not in schedulers]
        actions = [action for scheduler in schedulers for action in self._lose_scheduler(scheduler, cause, now)]
        if self.ending.begun or (schedulers and not others):
            return actions
        return [*actions, *super()._lose(others, cause, now)]

    def _lose_scheduler(self, process: Process, cause: Cause, now: float) -> list[Action]:
        """Go on with another scheduler; end the job if there cannot be one."""
        if self.succession.used_up:
            return self._fail(replace(cause, text=f"{cause.text}; {self.succession.refusal}"), now)
        loss = self.losses.add([process], cause, now - self._began, now, self.tasks)
        text, actions = self.succession.begin(process, self.tasks, self.usable)
        if not actions:
            return self._fail(replace(cause, text=f"{cause.text}; {text}"), now)
        self.losses.announcements.append(Announcement(f"{loss}; {text}", process if process.replaces else None))
        return [*actions, *self.changes.settings.scheduler_lost(now)]
