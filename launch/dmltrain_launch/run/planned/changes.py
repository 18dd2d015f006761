"""Planned changes of a running job: what the user asks for, and what comes of it. Pure.

`dmltrain job add`, `remove` and `set` ask for a change through the launcher's control socket (session.py). Workers come
(arrivals.py) and leave (leavers.py) while the others go on; changes of the kvstore are in settings.py. The scheduler's
lines say when a worker is a member. A request is answered when all that it asked for has happened, or cannot happen any
more.
"""

from __future__ import annotations

import re

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import events
from dmltrain_launch.agent.reports import Leaves, Slowest, Told, Viewed
from dmltrain_launch.control.message import ADD, SET
from dmltrain_launch.job import hosts
from dmltrain_launch.job.host import Host
from dmltrain_launch.run.planned.arrivals import Arrivals
from dmltrain_launch.run.planned.leavers import Leavers
from dmltrain_launch.run.planned.listing import Listing
from dmltrain_launch.run.planned.returning import Returning
from dmltrain_launch.run.planned.settings import SettingsChanges
from dmltrain_launch.run.planned.waiters import Waiter, Waiters
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.attempt import Attempt
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
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, USAGE_CODE
from dmltrain_launch.run.supervisor.process import Process

MOST_AT_ONCE = 1000  # workers that one request may add
MOST_DIGITS = 6  # of a number of workers: int() raises ValueError above 4300 digits (sys.set_int_max_str_digits)


NOT_ELASTIC = "the job's workers are those of its start: start it with --elastic to add and remove some while it runs"
PREPARED = (Copied, events.Ready, events.Probed, events.Bound, events.Reached)


class Changes:
    """All planned changes of a job. Of one whose policy ends it at the first loss, only the kvstore can change."""

    def __init__(self, attempt: Attempt):
        self._attempt, policy = attempt, attempt.policy
        self._waiters = Waiters()
        self.arrivals = Arrivals(attempt, self._waiters)
        self.leavers = Leavers(attempt, self._waiters)
        self.listing = Listing(attempt, self.arrivals, self.leavers, policy.listed)
        self.returning = Returning(attempt, self.arrivals, lambda: self.listing.known if policy.watched else {})
        self.settings = SettingsChanges(attempt, self._waiters)

    @property
    def deadline(self) -> float:
        return min(self.arrivals.deadline, self.returning.deadline, self.settings.deadline)

    # -- events --------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action] | None:
        """The actions for an event of a planned change; None if the event is not about one."""
        match event:
            case Asked():
                return self._asked(event, now)
            case Told():
                return self.settings.told(event, now - self._attempt.began, now)
            case Slowest():
                return self.settings.slowest(event, now)
        return self._member(event, now) if self._attempt.policy.goes_on else None

    def _member(self, event: Event, now: float) -> list[Action] | None:
        """The same for workers that come and leave."""
        match event:
            case Viewed():
                self._viewed(event, now - self._attempt.began)
                return [] if self._attempt.ending.begun else self.listing.retry(now)
            case Leaves():
                self.leavers.leaving(event.rank, event.reason)
            case Listed(hosts):
                self.listing.wanted = hosts
            case Unlisted(message):
                self._attempt.announce(f"{message}; the job goes on with the hosts that it has")
            case events.Noticed(host, tasks):
                self.leavers.noticed(host, tasks, now)
            case _:
                return None if self._attempt.ending.begun else self._arriving(event)
        return []

    def _arriving(self, event: Event) -> list[Action] | None:
        """The same for hosts that are being prepared."""
        attempt = self._attempt
        match event:
            case Unreached(host, message, code) | events.Refused(host, message, code) if self.arrivals.is_coming(host):
                return self.arrivals.failed(host, message, code)
            case Lost(host, reason) if self.arrivals.is_coming(host):
                return self.arrivals.lost(host, f"its agent {reason}")
            case Connected(host):
                self.arrivals.connected(host)
        if isinstance(event, PREPARED) and attempt.preparation.done:
            return [] if attempt.ending.is_being_replaced(event.host) else self.arrivals.prepared(event)
        return None

    def after(self, event: Event, now: float) -> list[Action]:
        """What an event means for planned changes, in addition to what it means for any job."""
        attempt = self._attempt
        match event:
            case events.Exited(_, task) if attempt.processes[task].left:
                self.leavers.left(attempt.processes[task], now - attempt.began)
            case events.Exited(_, task) if attempt.processes[task].left_with_host:
                attempt.processes[task].left_after = now - attempt.began
            case Lost(host) | Unreached(host) if attempt.ending.has_ended(host):
                attempt.ending.closed.add(host)
            case Lost(host):
                return self.arrivals.peer_lost(host)
            case Tick():
                return [*self.arrivals.tick(now), *self.returning.tick(now), *self.settings.tick(now)]
        return []

    def _asked(self, request: Asked, now: float) -> list[Action]:
        """Begin what the user asks for. A request that is impossible changes nothing and is answered with the
        reason."""
        waiter = Waiter(request.number)
        self._waiters.add(waiter)
        try:
            if request.do != SET and not self._attempt.policy.goes_on:
                raise LaunchError(NOT_ELASTIC)
            if why := self._attempt.unready:
                raise LaunchError(why, FAULT_CODE)
            if request.do == SET:
                return self.settings.ask(request.what, waiter, "dmltrain job set", now)
            if request.do == ADD:
                return self._add(request.what, waiter, now)
            return self.leavers.remove(request.what, waiter, "dmltrain job remove", now)
        except LaunchError as error:
            waiter.keys.clear()
            waiter.note(str(error), error.code)
            return []

    def _add(self, what: str, waiter: Waiter, now: float) -> list[Action]:
        if re.fullmatch(r"\d+", number := what.strip(), re.ASCII):
            if len(number) > MOST_DIGITS:
                raise LaunchError(f"a number of {len(number)} digits: expected 1 to {MOST_AT_ONCE} workers")
            self._check_more(int(number))
            return self.arrivals.place(int(number), waiter)
        wanted = [self._described(host) for host in hosts.from_list(what)]
        self._check_more(sum(workers for _, workers in wanted))
        return [action for host, workers in wanted for action in self.arrivals.add(host, workers, waiter, now)]

    def _check_more(self, workers: int) -> None:
        if not 1 <= workers <= MOST_AT_ONCE:
            raise LaunchError(f"{workers} workers: expected 1 to {MOST_AT_ONCE}")
        self.arrivals.check(workers)

    def _described(self, host: Host) -> tuple[Host, int]:
        """The host as the user has described it before, and how many workers it gets."""
        known = self._attempt.hosts.get(host.name) or self.listing.known.get(host.name)
        return known or host, host.slots or 1

    # -- what happens --------------------------------------------------------------------------------------------

    def _viewed(self, event: Viewed, after: float) -> None:
        """A view has begun, `after` s from the job's start: note which newcomers are members now."""
        self.leavers.viewed(event.workers)
        for number, process in enumerate(self._attempt.processes):
            if process.comes and process.runs and process.task.rank in event.workers:
                process.joined_after = after
                text = f"worker {process.task.rank} on {process.task.host.name} has joined the job in view {event.view}"
                self._attempt.announce(text)
                self._waiters.settle(("joins", number), text)

    def settle(self, now: float) -> list[Action]:
        """Give hosts back, use those that have come, and answer what is settled. Call it after each event."""
        attempt = self._attempt
        if attempt.ending.begun:
            self._waiters.settle_all(attempt.why_ended, FAULT_CODE)
            return list(self._waiters.replies())
        actions = self.listing.follow(now) if self.listing.wanted and not attempt.unready else []
        actions += self.leavers.give_back()
        self.returning.settle(now)
        if attempt.succession.binding:
            actions += self.settings.scheduler_lost(now)
        for text in attempt.replacer.place_servers(attempt.tasks, attempt.usable, now):
            attempt.announce(text)
        if self._waiters:
            self._settle_newcomers()
            self.leavers.settle()
        return [*actions, *self._waiters.replies()]

    def _settle_newcomers(self) -> None:
        for key in self._waiters.keys:
            match key:
                case ("joins", int(task)) if not self._attempt.processes[task].runs:
                    process = self._attempt.processes[task]
                    self._waiters.settle(key, _why_not(process), _code(process), task)
                case _:
                    pass


def _why_not(process: Process) -> str:
    if process.code == 0:
        return f"worker {process.task.rank} on {process.task.host.name} did not join the job: it ended first"
    return f"{process.fate}, before it had joined the job"


def _code(process: Process) -> int:
    return USAGE_CODE if process.code == USAGE_CODE else FAULT_CODE
