"""The supervisor of a job. Pure: events and the time in, actions out; session.py does the I/O.

prepare.py prepares the hosts. If that fails on several hosts, their problems are reported together: while hosts
connect, the job's end waits until all have connected or failed; in later steps it waits for TOGETHER_SECONDS. The first
process that fails ends the job and decides its exit code (cause.py). A process that stays stopped has failed. When all
workers have exited with 0, servers and scheduler have FINISH_SECONDS to exit. The end is the same for all hosts
(ending.py).

An elastic job goes on without workers and servers that it loses (losses.py), or replaces them (replace.py). It fails if
no worker or no server is left and none is to come. What happens when it loses its scheduler: elastic.py.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import events
from dmltrain_launch.agent.commands import Stop
from dmltrain_launch.channels.exit_text import signal_name
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
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
    FINISH_SECONDS,
    LATE_SECONDS,
    LOST_A_PEER,
    RECONNECT_ATTEMPTS,
    RECONNECT_LOST_SECONDS,
    RECONNECT_SECONDS,
    TIMEOUT_CODE,
    UNLIMITED,
    Limits,
    as_shell,
)
from dmltrain_launch.run.supervisor.losses import Announcement
from dmltrain_launch.run.supervisor.process import Process, Processes

CANNOT_START = (126, 127)  # codes of an agent that could not start a process


class Supervisor(Attempt):
    """One attempt. Call `handle` for each event and do its actions until `over`; Tick at `deadline`."""

    def __init__(self, job: Job, hosts: Sequence[Host], limits: Limits = UNLIMITED, check: bool = False):
        super().__init__(job, hosts, limits, check)
        self._secret: tuple[str, str, str | None] = "", "", None  # the job's key, certificate and log folder
        self._began = 0.0

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self, key: str, log_folder: str | None, now: float, certificate: str = "") -> list[Action]:
        """The first actions. `key` and `certificate` (PEM, with its private key) are sent to the agents only."""
        self._began = now
        self._timeout_at, self._start_at = now + self.limits.timeout, now + self.limits.start
        self._secret = key, certificate, log_folder
        return self.preparation.begin()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Update the state. Returns the actions that the event requires."""
        match event:
            case Connected(host):
                return list(self.ending.connected(host, *self._secret, now))
            case Copied() | events.Ready() | events.Probed() | events.Bound() | events.Reached() | events.Measured():
                return self._prepared(event, now)
            case Unreached():
                return self._unreached(event, now)
            case events.Refused():
                return self._refused(event, now)
            case events.Started(_, task, pid):
                self.processes[task].pid = pid
                if self.tasks.started:
                    self._start_at = math.inf
            case events.Exited():
                return self._exited(self.processes[event.task], event.code, now)
            case events.Frozen():
                return self._frozen(event, now)
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
                return self._fail(Cause(FAULT_CODE, message), now)
            case Tick():
                return self._tick(now)
        return []

    # -- the start -----------------------------------------------------------------------------------------------

    def _prepared(self, event: events.Event | Copied, now: float) -> list[Action]:
        if self.ending.begun or self.ending.is_being_replaced(event.host):
            return []
        try:
            actions = self.preparation.handle(event)
        except LaunchError as error:
            return self._fail(Cause(error.code, str(error)), now)
        if isinstance(event, Copied):
            self._start_at = now + self.limits.start
        return self._fail_together(now) if self.verdict.faults else self._proceed(actions, now)

    def _proceed(self, actions: list[Action], now: float) -> list[Action]:
        """Start the processes if all hosts are prepared."""
        if not self.preparation.done and self.hosts:
            return actions
        if self.check:
            return self._end(now)
        hosts = list(self.hosts.values())
        self.tasks = Processes(self.job, hosts, self.preparation.chosen_ports)
        return [Send(host.name, self.tasks.start_command(host)) for host in hosts]

    def _unreached(self, event: Unreached, now: float) -> list[Action]:
        if self.ending.is_being_replaced(event.host):
            self.ending.left[event.host] = None
            return []
        if self.check and not self.ending.begun:
            return self._proceed(self.preparation.leave_out(event.host, event.message, event.code), now)
        self.ending.unreached.add(event.host)
        self.verdict.add_fault(event.host, Cause(event.code, event.message))
        return self._fail_together(now)

    def _refused(self, event: events.Refused, now: float) -> list[Action]:
        if event.host in self.ending.given_up:
            return []
        starting = self.tasks.starting_on(event.host)
        if starting and event.code in CANNOT_START and not self.ending.begun:
            return self._lose([starting], Cause(event.code, event.message, starting), now)
        cause = Cause(event.code, event.message)
        if not self.ending.begun and self._can_lose(event.host):
            return [Send(event.host, Stop(self.limits.grace)), *self._lose_host(event.host, cause, now)]
        if self.preparation.done or self.ending.begun:
            return self._fail(cause, now)
        self.verdict.add_fault(event.host, cause)
        self.verdict.wait_for_other_faults(now)
        return self._fail_together(now)

    def _fail_together(self, now: float) -> list[Action]:
        """End the job, unless another host may still report a problem."""
        if self.ending.begun or self.preparation.waiting_for - self.verdict.faults.keys():
            return []
        return self._fail(self.verdict.first_fault(self.hosts), now)

    # -- while processes run -------------------------------------------------------------------------------------

    def _exited(self, process: Process, code: int, now: float) -> list[Action]:
        process.code, process.ended_by_us = code, self.ending.begun or process.lost
        if self.tasks.a_worker_done or not self.tasks.scheduler_lives:
            self.replacer.cancel()
        if process.ended_by_us:
            return []
        cause = Cause(as_shell(code), process.fate, process)
        if self.losses.allow_exit(process, code, self.tasks):
            return self._lose([process], cause, now)
        if code == LOST_A_PEER and not self.tasks.workers_done:
            self.verdict.add_suspect(cause, now)
            self.replacer.cancel()
        elif code not in (0, LOST_A_PEER):
            return self._fail(cause, now)
        return self._end_if_done(now)

    def _end_if_done(self, now: float) -> list[Action]:
        if self.tasks.workers_done and not self.job.elastic:
            self.verdict.drop_suspect()
        suspect = self.verdict.suspect
        if self.tasks.ended:
            return self._fail(self.losses.first(now) or suspect, now) if suspect else self._end(now)
        if suspect:
            return self._fail(self.losses.first(now) or suspect, now) if self.losses.explained_now(now) else []
        # a worker that left on purpose may have been the last one at the job's end: only the scheduler knows
        a_worker_left = any(worker.left for worker in self.tasks.workers)
        if not self.workers_left and not a_worker_left and (cause := self.losses.first(now)):
            return self._fail(cause, now)
        if self.tasks.workers_done:
            self._finish_at = min(self._finish_at, now + FINISH_SECONDS)
        elif self.tasks.scheduler_done and self.tasks.only_replacements_left:
            self._finish_at = min(self._finish_at, now + LATE_SECONDS)
        return []

    def _lose(self, lost: Sequence[Process], cause: Cause, now: float) -> list[Action]:
        """Go on without these processes, if a worker and a server are left or will come; else end the job."""
        loss = self.losses.add(lost, cause, now - self._began, now, self.tasks)
        replanned = [] if self.verdict.suspect else self.replacer.lost(lost, self.tasks, self.usable, now)
        failed = cause.process if cause.process and cause.process.replaces else None
        self.losses.announcements.append(Announcement("; ".join([loss, *replanned]), failed))
        if not self.workers_left and cause.code == LOST_A_PEER:
            self.verdict.add_suspect(cause, now)
        elif not self.workers_left:
            return self._fail(self.losses.first(now) or cause, now)
        elif not self.servers_left:
            return self._fail(cause, now)
        return self._end_if_done(now)

    def _frozen(self, event: events.Frozen, now: float) -> list[Action]:
        process = self.processes[event.task]
        text = f"{process.label} has been stopped (SIGSTOP?) for {event.seconds} s"
        cause = Cause(128 + signal.SIGSTOP, text, process)
        if process.lost:
            return []
        return self._stays_stopped(process, cause, now)

    def _stays_stopped(self, process: Process, cause: Cause, now: float) -> list[Action]:
        if not self.losses.allow([process], self.tasks):
            return self._fail(cause, now)
        if self.tasks.scheduler_done:
            return self._lose([process], cause, now)
        self.losses.add_stopped(process, cause, now)
        return []

    def _note_stopped(self, event: events.Stopped) -> None:
        for pid, task in event.processes:
            label = self.tasks.label_of(pid, task, event.host)
            self.ending.stopped.append(label)
            if task is not None and self.cause is None and not self.processes[task].lost:
                # no other cause: this process kept the job from ending
                text = f"{label} did not end: it is stopped"
                self.verdict.cause = Cause(128 + signal.SIGSTOP, text, self.processes[task])

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
        goes_on = not self.ending.begun and self._can_lose(host)
        return [connect, *(self._lose_host(host, cause, now) if goes_on else self._fail(cause, now))]

    def _can_lose(self, host: str) -> bool:
        return self.losses.allow(self.tasks.on(host), self.tasks)

    def _lose_host(self, host: str, cause: Cause, now: float) -> list[Action]:
        """Go on without the processes that still run on a host."""
        self.ending.given_up.add(host)
        self.verdict.silent.pop(host, None)
        moved = self.replacer.host_lost(host, self.tasks, self.usable, now)
        self.losses.announcements += map(Announcement, moved)
        return self._lose(
            [process for process in self.tasks.on(host) if process.code is None and not process.lost], cause, now
        )

    def _interrupted(self, number: int, now: float) -> list[Action]:
        self.interrupted = True
        if not self.ending.begun:
            return self._fail(Cause(128 + number, f"the launcher got {signal_name(number)}"), now)
        self.ending.grace = 0.0
        return self._end(now)

    def _tick(self, now: float) -> list[Action]:
        if now >= self.ending.give_up_at:
            lost = [Lost(name, "did not end the job in time") for name in self.ending.unanswered(self.hosts)]
            return [action for lost_agent in lost for action in self._lost(lost_agent, now)]
        if now >= self._timeout_at:
            text = f"the job took more than {self.limits.timeout:g} s; not ended: {self.tasks.running}"
            return self._fail(Cause(TIMEOUT_CODE, text), now, dump=True)
        if now >= self._start_at:
            return self._late(now)
        if now >= self.verdict.together_at:
            return self._fail(self.verdict.first_fault(self.hosts), now)
        if self.verdict.suspect and now >= self.verdict.suspect_at:
            late = not self.losses.explained(now) and any(process.may_fail for process in self.processes)
            if late and self.verdict.extend_wait(now, self.limits.grace):
                return []
            return self._fail(self.verdict.cause_after_suspect(self.losses.first(now) or self.verdict.suspect), now)
        if now >= self._finish_at:
            return self._end(now)
        return self.replacer.start(self.tasks, self.hosts, now)

    def _late(self, now: float) -> list[Action]:
        if self.preparation.step == "copy":  # --start-timeout does not limit the copy
            self._start_at = math.inf
            return []
        waiting = self.preparation.waiting or self.tasks.not_started
        text = f"the job has not started within {self.limits.start:g} s (--start-timeout); waiting for {waiting}"
        return self._fail(Cause(TIMEOUT_CODE, text), now)

    # -- the end -------------------------------------------------------------------------------------------------

    def _fail(self, cause: Cause, now: float, dump: bool = False) -> list[Action]:
        self.verdict.decide(cause, self.hosts)
        return [] if self.ending.begun else self._end(now, dump)

    def _end(self, now: float, dump: bool = False) -> list[Action]:
        self._timeout_at = self._start_at = self._finish_at = math.inf
        self.verdict.clear_deadlines()
        self.replacer.cancel()
        return list(self.ending.begin(self.hosts, now, dump))
