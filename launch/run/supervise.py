"""What a job does about what happens to it. Pure: events and the time in, actions out; session.py does the I/O.

Rules. prepare.py brings the hosts to where processes can start. Problems of several hosts are reported together: the
end waits for them as long as connecting takes, and otherwise TOGETHER_SECONDS. The first process to fail decides the
job's end and its exit code; one that stays stopped has failed. A process that exits with 75 says that another one was
lost, so it yields to another failure that follows within SUSPECT_SECONDS, and to a host that has gone quiet. When all
workers have exited 0, servers and scheduler have FINISH_SECONDS to end by themselves. The end is one for all hosts:
every agent is asked once, and asked again only to hurry. The job is over when each has said what is left on its host;
an agent that cannot say it is replaced, once, by a new one that finds the job's processes by their mark.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch import LaunchError
from launch.agent import KILL_SECONDS, commands
from launch.agent.events import (
    Bound,
    Ended,
    Exited,
    Frozen,
    Measured,
    Probed,
    Reached,
    Ready,
    Refused,
    Started,
    Stopped,
)
from launch.job.host import Host
from launch.job.job import OWNED, Job, Ports, Task, tasks, workdir_of
from launch.job.role import SCHEDULER, WORKER
from launch.run.action import Action, Connect, Send
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
    signal_name,
)
from launch.run.prepare import Preparation

LOST_A_PEER = 75  # exit code of a process that ended because another process of the job was lost
SUSPECT_SECONDS = 1.0
TOGETHER_SECONDS = 1.0  # between the first host that cannot do a step of the preparation and the job's end
FINISH_SECONDS = 0.5
ANSWER_SECONDS = 3.0  # how long an agent may take to answer beyond what it was given
AGENT_SILENCE_SECONDS = 10.0  # without a word from the launcher, an agent ends the job on its host
SILENCE_SECONDS = 9.5  # without a word from an agent, the launcher gives it up
USAGE_CODE, TIMEOUT_CODE, FAULT_CODE = 2, 124, 125


@dataclass(frozen=True)
class Limits:
    """Seconds: between TERM and KILL, for the whole job, until the first process starts (copying excluded), and of
    silence on either side of a channel."""

    grace: float = 5.0
    timeout: float = math.inf
    start: float = math.inf
    silence: float = SILENCE_SECONDS
    agent_silence: float = AGENT_SILENCE_SECONDS


@dataclass
class Process:
    """A task and what became of it: `pid` 0 before its start, `code` None before its end (minus n for signal n)."""

    task: Task
    pid: int = 0
    code: int | None = None
    ended_by_us: bool = False

    @property
    def label(self) -> str:
        pid = f"pid {self.pid} " if self.pid else ""
        return f"{self.task.role} {self.task.rank} ({pid}on {self.task.host.name})"


    @property
    def fate(self) -> str:
        if self.code is None:
            return f"{self.label} has not ended"
        if self.code < 0:
            return f"{self.label} was killed by {signal_name(-self.code)}"
        told = " (it lost another process of the job)" if self.code == LOST_A_PEER else ""
        return f"{self.label} exited with code {self.code}{told}"


def as_shell(code: int) -> int:
    """An exit code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


@dataclass(frozen=True)
class Cause:
    """Why a job ends before its workers are done: exit code, words, and the process when it was one."""

    code: int
    text: str
    process: Process | None = None


class Supervisor:
    """The state of one job. `handle` each event, do the actions, until `over`; wake with a Tick at `deadline`.

    With `check` the job ends before its first process starts.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], limits: Limits = Limits(), check: bool = False):
        self.job, self.limits, self.check, self.grace = job, limits, check, limits.grace
        self.preparation = Preparation(job, hosts, check)
        self.processes = [Process(task) for task in tasks(job, list(hosts), Ports())]
        self.cause: Cause | None = None
        self.suspect: Cause | None = None  # a process that lost another one, and came first
        self.stopped: list[str] = []  # labels of processes found in state T
        self.left: dict[str, tuple[int, ...] | None] = {}  # by host; None when nobody could look
        self.unreached: set[str] = set()  # hosts that never had an agent
        self.quiet: dict[str, float] = {}  # by host, s
        self._faults: dict[str, Cause] = {}  # by host: why it cannot do its part of the preparation
        self._warned = 0
        self._asked: set[str] = set()  # hosts whose agent was told of the job
        self._recovering: set[str] = set()
        self.ending = self.interrupted = False
        # times at which something is due
        self._timeout_at = self._start_at = self._suspect_at = self._finish_at = self._give_up_at = math.inf
        self._together_at = math.inf

    @property
    def hosts(self) -> dict[str, Host]:
        """By name; with what the agents have found out, once they have."""
        return self.preparation.hosts

    @property
    def over(self) -> bool:
        return self.ending and self.left.keys() | self.unreached == self.hosts.keys()

    @property
    def deadline(self) -> float:
        return min(self._timeout_at, self._start_at, self._together_at, self._suspect_at, self._finish_at,
                   self._give_up_at)  # fmt: skip

    @property
    def started(self) -> bool:
        return all(process.pid for process in self.processes)

    @property
    def exit_code(self) -> int:
        if self.cause:
            return self.cause.code
        return FAULT_CODE if any(pids or pids is None for pids in self.left.values()) else 0

    @property
    def restartable(self) -> bool:
        """Whether the same job, started anew, may end otherwise: a process or a host was lost."""
        fault = self.cause is not None and (self.cause.process is not None or self.cause.code == FAULT_CODE)
        return fault and self.started and not self.interrupted and self.exit_code not in (USAGE_CODE, TIMEOUT_CODE)

    def take_warnings(self) -> list[str]:
        """What the preparation warns of, once."""
        problems, self._warned = self.preparation.problems[self._warned :], len(self.preparation.problems)
        return [problem.text for problem in problems if not problem.fatal]

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self, key: str, log_folder: str | None, now: float) -> list[Action]:
        """The first actions. The key goes to the agents and nowhere else."""
        self._timeout_at, self._start_at = now + self.limits.timeout, now + self.limits.start
        self._secret = key, log_folder
        return self.preparation.begin()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event; what is to be done about it."""
        match event:
            case Connected():
                return self._connected(event)
            case Ready() | Copied() | Probed() | Bound() | Reached() | Measured():
                return self._prepared(event, now)
            case Unreached():
                return self._unreached(event, now)
            case Refused():
                return self._refused(event, now)
            case Started(_, task, pid):
                self.processes[task].pid = pid
                if self.started:
                    self._start_at = math.inf
            case Exited():
                return self._exited(self.processes[event.task], event.code, now)
            case Frozen(_, task, seconds):
                process = self.processes[task]
                text = f"{process.label} has been stopped (SIGSTOP?) for {seconds} s"
                return self._fail(Cause(128 + signal.SIGSTOP, text, process), now)
            case Stopped():
                self._note_stopped(event)
            case Ended(host, left):
                self.left[host] = left
            case Quiet(host, seconds):
                self.quiet[host] = seconds
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

    def _connected(self, event: Connected) -> list[Action]:
        host = event.host
        if host in self.unreached:
            return []  # it came too late: without a job its agent ends by itself
        again = host in self._recovering
        self._asked.add(host)
        first = Send(host, self._job_message(host, again))
        return [first, self._stop_message(host)] if again else [first]

    def _job_message(self, host: str, again: bool) -> commands.Job:
        key, log_folder = ("", None) if again else self._secret
        return commands.Job(self.job.mark, host, self.grace, self.limits.agent_silence, key, log_folder)

    def _prepared(self, event: Event, now: float) -> list[Action]:
        if self.ending:
            return []
        try:
            actions = self.preparation.handle(event)
        except LaunchError as error:
            return self._fail(Cause(error.code, str(error)), now)
        if isinstance(event, Copied):
            self._start_at = now + self.limits.start
        return self._told_together(now) if self._faults else self._prepared_by(actions, now)

    def _prepared_by(self, actions: list[Action], now: float) -> list[Action]:
        if not self.preparation.done and self.hosts:
            return actions
        if self.check:
            return self._end(now)
        hosts = list(self.hosts.values())
        self.processes = [Process(task) for task in tasks(self.job, hosts, self.preparation.chosen_ports)]
        return [Send(host.name, self._start_message(host)) for host in hosts]

    def _start_message(self, host: Host) -> commands.Start:
        rows = tuple(
            commands.Spawn(
                index,
                each.task.argv,
                dict(each.task.environment),
                workdir_of(self.job, host),
                self.job.script,
                listens=each.task.role == SCHEDULER,
                memory=self.job.memory.get(each.task.role, 0),
            )
            for index, each in enumerate(self.processes)
            if each.task.host.name == host.name
        )
        return commands.Start(OWNED, rows)

    def _unreached(self, event: Unreached, now: float) -> list[Action]:
        if event.host in self._recovering:
            self.left[event.host] = None
            return []
        if self.check and not self.ending:
            return self._prepared_by(self.preparation.leave_out(event.host, event.message, event.code), now)
        self.unreached.add(event.host)
        self._faults[event.host] = Cause(event.code, event.message)
        return self._told_together(now)

    def _refused(self, event: Refused, now: float) -> list[Action]:
        cause = Cause(event.code, event.message)
        if self.preparation.done or self.ending:
            return self._fail(cause, now)
        self._faults[event.host] = cause
        self._together_at = min(self._together_at, now + TOGETHER_SECONDS)
        return self._told_together(now)

    def _told_together(self, now: float) -> list[Action]:
        """The end, unless another host may yet say that it is no better off."""
        if self.ending or self.preparation.waiting_for - self._faults.keys():
            return []
        return self._fail(self._known_faults[0], now)

    @property
    def _known_faults(self) -> list[Cause]:
        """In the order of the hosts."""
        return [self._faults[name] for name in self.hosts if name in self._faults]

    # -- the course ----------------------------------------------------------------------------------------------

    def _exited(self, process: Process, code: int, now: float) -> list[Action]:
        process.code, process.ended_by_us = code, self.ending
        if self.ending:
            return []
        done = all(each.code == 0 for each in self.processes if each.task.role == WORKER)
        if code == LOST_A_PEER and not done:
            if not self.suspect:
                self.suspect = Cause(code, process.fate, process)
                self._suspect_at = now + SUSPECT_SECONDS
        elif code not in (0, LOST_A_PEER):
            return self._fail(Cause(as_shell(code), process.fate, process), now)
        if all(each.code is not None for each in self.processes):
            return self._fail(self.suspect, now) if self.suspect else self._end(now)
        if done and not self.suspect and self._finish_at == math.inf:
            self._finish_at = now + FINISH_SECONDS
        return []

    def _note_stopped(self, event: Stopped) -> None:
        for pid, task in event.processes:
            if task is None:
                label = f"a process (pid {pid} on {event.host})"
            elif self.processes[task].pid == pid:
                label = self.processes[task].label
            else:
                label = f"a descendant (pid {pid}) of {self.processes[task].label}"
            self.stopped.append(label)
            if task is not None and self.cause is None:
                # nothing else was wrong: it kept the job from ending
                self.cause = Cause(128 + signal.SIGSTOP, f"{label} did not end: it is stopped", self.processes[task])

    def _lost(self, event: Lost, now: float) -> list[Action]:
        if event.host in self.left or event.host in self.unreached:
            return []  # it had ended
        if event.host in self._recovering:
            self.left[event.host] = None
            return []
        agent = self.preparation.agents.get(event.host)
        pid = f" (pid {agent.pid})" if agent else ""
        self._recovering.add(event.host)
        actions = self._fail(Cause(FAULT_CODE, f"the agent on {event.host}{pid} {event.reason}"), now)
        self._give_up_at = now + self._patience
        return [Connect(event.host, again=True), *actions]

    def _interrupted(self, number: int, now: float) -> list[Action]:
        self.interrupted = True
        if not self.ending:
            return self._fail(Cause(128 + number, f"the launcher got {signal_name(number)}"), now)
        self.grace = 0.0
        return self._end(now)

    def _tick(self, now: float) -> list[Action]:
        if now >= self._give_up_at:
            silent = [name for name in self.hosts if name not in self.left]
            actions = [self._lost(Lost(name, "did not end the job in time"), now) for name in silent]
            return [action for each in actions for action in each]
        if now >= self._timeout_at:
            running = ", ".join(each.label for each in self.processes if each.code is None)
            text = f"the job took more than {self.limits.timeout:g} s; not ended: {running}"
            return self._fail(Cause(TIMEOUT_CODE, text), now, dump=True)
        if now >= self._start_at:
            return self._late(now)
        if now >= self._together_at:
            return self._fail(self._known_faults[0], now)
        if self.suspect and now >= self._suspect_at:
            return self._fail(self._suspicion(), now)
        return self._end(now) if now >= self._finish_at else []

    def _late(self, now: float) -> list[Action]:
        if self.preparation.step == "copy":  # as long as bytes flow
            self._start_at = math.inf
            return []
        waiting = self.preparation.waiting or ", ".join(each.label for each in self.processes if not each.pid)
        text = f"the job has not started within {self.limits.start:g} s (--start-timeout); waiting for {waiting}"
        return self._fail(Cause(TIMEOUT_CODE, text), now)

    def _suspicion(self) -> Cause:
        """Who lost another process is the cause, unless a whole host has gone quiet: that is whom it lost."""
        quiet = max(self.quiet, key=lambda host: self.quiet[host], default=None)
        if quiet is None or not self.quiet[quiet]:
            return self.suspect
        text = f"nothing has come from {quiet} for {self.quiet[quiet]:.0f} s: is the host down, or its network cut?"
        return Cause(FAULT_CODE, text)

    # -- the end -------------------------------------------------------------------------------------------------

    def _fail(self, cause: Cause, now: float, dump: bool = False) -> list[Action]:
        if self._faults:  # what several hosts have in common is said once
            texts = dict.fromkeys([cause.text, *(fault.text for fault in self._known_faults)])
            cause = replace(cause, text="\n".join(texts))
        self.cause = self.cause or cause
        return [] if self.ending else self._end(now, dump)

    def _end(self, now: float, dump: bool = False) -> list[Action]:
        """Ask every agent to end the job's processes; again, to hurry. `dump`: print their stacks first."""
        self.ending = True
        self._timeout_at = self._start_at = self._together_at = self._suspect_at = self._finish_at = math.inf
        self._give_up_at = now + self._patience
        self.unreached |= self.hosts.keys() - self._asked
        asked = [name for name in self.hosts if name in self._asked - self.left.keys() - self._recovering]
        return [self._stop_message(name, dump) for name in asked]

    def _stop_message(self, host: str, dump: bool = False) -> Send:
        return Send(host, commands.Stop(self.grace, dump))

    @property
    def _patience(self) -> float:
        return self.grace + KILL_SECONDS + ANSWER_SECONDS
