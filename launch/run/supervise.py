"""The supervisor of a job. Pure: events and the time in, actions out; session.py does the I/O.

prepare.py prepares the hosts. If that fails on several hosts, their problems are reported together: the job's end waits
until all hosts have connected or failed, in later steps TOGETHER_SECONDS. The first process that fails ends the job and
decides its exit code (cause.py). A process that stays stopped has failed. When all workers have exited with 0, servers
and scheduler have FINISH_SECONDS to exit. The end is the same for all hosts (ending.py).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from launch import LaunchError
from launch.agent import events
from launch.channels.exit_text import signal_name
from launch.job.host import Host
from launch.job.job import Job, Ports
from launch.run.action import Action, Connect, Send
from launch.run.cause import Cause, Verdict
from launch.run.ending import Ending
from launch.run.event import (
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
from launch.run.limit import (
    FAULT_CODE,
    FINISH_SECONDS,
    LOST_A_PEER,
    RECONNECT_LOST_SECONDS,
    RECONNECT_SECONDS,
    TIMEOUT_CODE,
    UNLIMITED,
    USAGE_CODE,
    Limits,
    as_shell,
)
from launch.run.prepare import Preparation
from launch.run.process import Process, Processes


class Supervisor:
    """The state of one attempt. Call `handle` for each event and do its actions until `over`; Tick at `deadline`.

    With `check` the job ends before its first process starts.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], limits: Limits = UNLIMITED, check: bool = False):
        self.job, self.limits, self.check = job, limits, check
        self.preparation = Preparation(job, hosts, check)
        self.tasks = Processes(job, hosts, Ports())
        self.verdict = Verdict()
        self.ending = Ending(job, limits)
        self.interrupted = False
        self._secret: tuple[str, str, str | None] = "", "", None  # the job's key, certificate and log folder
        self._warned = 0
        self._timeout_at = self._start_at = self._finish_at = math.inf  # times at which something is due

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> dict[str, Host]:
        """Hosts by name, completed by what their agents have reported."""
        return self.preparation.hosts

    @property
    def processes(self) -> list[Process]:
        return self.tasks.all

    @property
    def cause(self) -> Cause | None:
        return self.verdict.cause

    @property
    def over(self) -> bool:
        return self.ending.over(self.hosts)

    @property
    def deadline(self) -> float:
        return min(
            self._timeout_at,
            self._start_at,
            self._finish_at,
            self.verdict.together_at,
            self.verdict.suspect_at,
            self.ending.give_up_at,
        )

    @property
    def exit_code(self) -> int:
        if self.cause:
            return self.cause.code
        return 0 if self.ending.clean else FAULT_CODE

    @property
    def restartable(self) -> bool:
        """Whether a restart may help: a process or a host was lost."""
        if self.cause is None or self.interrupted or self.exit_code in (USAGE_CODE, TIMEOUT_CODE):
            return False
        return self.tasks.started and (self.cause.process is not None or self.cause.code == FAULT_CODE)

    def take_warnings(self) -> list[str]:
        """The preparation's new warnings."""
        problems, self._warned = self.preparation.problems[self._warned :], len(self.preparation.problems)
        return [problem.text for problem in problems if not problem.fatal]

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self, key: str, log_folder: str | None, now: float, certificate: str = "") -> list[Action]:
        """The first actions. `key` and `certificate` (PEM, with its private key) are sent to the agents only."""
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
        if self.ending.begun:
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
        cause = Cause(event.code, event.message)
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
        process.code, process.ended_by_us = code, self.ending.begun
        if self.ending.begun:
            return []
        if code == LOST_A_PEER and not self.tasks.workers_done:
            self.verdict.add_suspect(Cause(code, process.fate, process), now)
        elif code not in (0, LOST_A_PEER):
            return self._fail(Cause(as_shell(code), process.fate, process), now)
        suspect = self.verdict.suspect
        if self.tasks.ended:
            return self._fail(suspect, now) if suspect else self._end(now)
        if self.tasks.workers_done and not suspect and self._finish_at == math.inf:
            self._finish_at = now + FINISH_SECONDS
        return []

    def _frozen(self, event: events.Frozen, now: float) -> list[Action]:
        process = self.processes[event.task]
        text = f"{process.label} has been stopped (SIGSTOP?) for {event.seconds} s"
        return self._fail(Cause(128 + signal.SIGSTOP, text, process), now)

    def _note_stopped(self, event: events.Stopped) -> None:
        for pid, task in event.processes:
            label = self.tasks.label_of(pid, task, event.host)
            self.ending.stopped.append(label)
            if task is not None and self.cause is None:
                # no other cause: this process kept the job from ending
                text = f"{label} did not end: it is stopped"
                self.verdict.cause = Cause(128 + signal.SIGSTOP, text, self.processes[task])

    def _lost(self, event: Lost, now: float) -> list[Action]:
        host = event.host
        if self.ending.knows(host):
            return []  # the agent had finished
        if self.ending.is_being_replaced(host):
            self.ending.left[host] = None
            return []
        agent = self.preparation.agents.get(host)
        pid = f" (pid {agent.pid})" if agent else ""
        seconds = RECONNECT_SECONDS if event.ended else RECONNECT_LOST_SECONDS
        self.ending.replace(host, now, seconds)
        return [
            Connect(host, seconds),
            *self._fail(Cause(FAULT_CODE, f"the agent on {host}{pid} {event.reason}"), now),
        ]

    def _interrupted(self, number: int, now: float) -> list[Action]:
        self.interrupted = True
        if not self.ending.begun:
            return self._fail(Cause(128 + number, f"the launcher got {signal_name(number)}"), now)
        self.ending.grace = 0.0
        return self._end(now)

    def _tick(self, now: float) -> list[Action]:
        if now >= self.ending.give_up_at:
            lost = [Lost(name, "did not end the job in time") for name in self.ending.unanswered(self.hosts)]
            return [action for each in lost for action in self._lost(each, now)]
        if now >= self._timeout_at:
            text = f"the job took more than {self.limits.timeout:g} s; not ended: {self.tasks.running}"
            return self._fail(Cause(TIMEOUT_CODE, text), now, dump=True)
        if now >= self._start_at:
            return self._late(now)
        if now >= self.verdict.together_at:
            return self._fail(self.verdict.first_fault(self.hosts), now)
        if self.verdict.suspect and now >= self.verdict.suspect_at:
            return self._fail(self.verdict.from_suspect(self.verdict.suspect), now)
        return self._end(now) if now >= self._finish_at else []

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
        self.verdict.nothing_due()
        return list(self.ending.begin(self.hosts, now, dump))
