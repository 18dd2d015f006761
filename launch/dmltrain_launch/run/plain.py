"""The supervisor of a job that is not elastic: only its kvstore can change while it runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.events import Reported
from dmltrain_launch.agent.reports import Slowest, Told
from dmltrain_launch.control.message import SET
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.run.planned.settings import SettingsChanges
from dmltrain_launch.run.planned.waiters import Waiter, Waiters
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.event import Asked, Event, Tick
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, UNLIMITED, Limits
from dmltrain_launch.run.supervisor.supervise import Supervisor

NOT_ELASTIC = "the job's workers are those of its start: start it with --elastic to add and remove some while it runs"


class PlainSupervisor(Supervisor):
    """See `Supervisor`."""

    def __init__(self, job: Job, hosts: Sequence[Host], limits: Limits = UNLIMITED):
        super().__init__(job, hosts, limits)
        self._waiters = Waiters()
        self._settings = SettingsChanges(self, self._waiters)

    @property
    def deadline(self) -> float:
        return min(super().deadline, self._settings.deadline)

    def handle(self, event: Event, now: float) -> list[Action]:
        event = event.report if isinstance(event, Reported) else event
        match event:
            case Asked():
                actions = self._asked(event, now)
            case Told():
                actions = self._settings.told(event, now - self._began, now)
            case Slowest():
                actions = self._settings.slowest(event, now)
            case _:
                actions = super().handle(event, now)
        if isinstance(event, Tick):
            actions = [*actions, *self._settings.tick(now)]
        return [*actions, *self._answers()]

    def _asked(self, request: Asked, now: float) -> list[Action]:
        waiter = Waiter(request.number)
        self._waiters.add(waiter)
        try:
            if request.do != SET:
                raise LaunchError(NOT_ELASTIC)
            if why := self.unready:
                raise LaunchError(why, FAULT_CODE)
            return self._settings.ask(request.what, waiter, "dmltrain job set", now)
        except LaunchError as error:
            waiter.note(str(error), error.code)
            return []

    def _answers(self) -> list[Action]:
        if self.ending.begun:
            self._waiters.settle_all(self.why_ended, FAULT_CODE)
        return list(self._waiters.replies())
