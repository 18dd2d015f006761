"""What a job does about what happens to it. Pure: events and the time in, actions out; `launch.session` does the I/O.

Rules. The first process to fail decides the job's end and its exit code; one that stays stopped has failed. A
process that exits with 75 says that another one was lost, so it yields to another failure that follows within
SUSPECT_SECONDS. When all workers have exited 0, servers and scheduler have FINISH_SECONDS to end by themselves. The
end is one for all hosts: every agent is asked once, and asked again only to hurry. The job is over when each has
said what is left on its host; an agent that cannot say it is replaced, once, by a new one that finds the job's
processes by their mark.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.agent import KILL_SECONDS
from launch.event import (
    Ended,
    Event,
    Exited,
    Frozen,
    Interrupted,
    Lost,
    OutputFailed,
    Ready,
    Refused,
    Started,
    Stopped,
    Tick,
    signal_name,
)
from launch.host import Host
from launch.job import OWNED, SCHEDULER, WORKER, Job, Ports, Task, host_of, tasks

LOST_A_PEER = 75  # exit code of a process that ended because another process of the job was lost
SUSPECT_SECONDS = 1.0
FINISH_SECONDS = 0.5
ANSWER_SECONDS = 3.0  # how long an agent may take to answer beyond what it was given
SILENCE_SECONDS = 10.0  # without a word from the other side, agent and launcher think each other gone
TIMEOUT_CODE, FAULT_CODE = 124, 125


@dataclass(frozen=True)
class Send:
    """Send a message of the agent's protocol to the agent of `host`."""

    host: str
    message: dict


@dataclass(frozen=True)
class Recover:
    """Start another agent on `host` and have it end the job's processes there."""

    host: str


Action = Send | Recover


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
    """The state of one job. `handle` each event, do the actions, until `over`; wake with a Tick at `deadline`."""

    def __init__(self, job: Job, hosts: Sequence[Host], grace: float, timeout: float = 0.0,
                 silence: float = SILENCE_SECONDS):  # fmt: skip
        self.job, self.hosts, self.grace, self.silence = job, {host.name: host for host in hosts}, grace, silence
        self.timeout = timeout or math.inf  # s from begin()
        self.processes = [Process(task) for task in tasks(job, hosts, Ports())]
        self.cause: Cause | None = None
        self.suspect: Cause | None = None  # a process that lost another one, and came first
        self.stopped: list[str] = []  # labels of processes found in state T
        self.left: dict[str, tuple[int, ...] | None] = {}  # by host; None when nobody could look
        self._ready: dict[str, Ready] = {}
        self._recovering: set[str] = set()
        self.ending = self.interrupted = False
        # times at which something is due
        self._timeout_at = self._suspect_at = self._finish_at = self._give_up_at = math.inf

    @property
    def over(self) -> bool:
        return self.left.keys() == self.hosts.keys()

    @property
    def deadline(self) -> float:
        return min(self._timeout_at, self._suspect_at, self._finish_at, self._give_up_at)

    @property
    def started(self) -> bool:
        return all(process.pid for process in self.processes)

    @property
    def exit_code(self) -> int:
        if self.cause:
            return self.cause.code
        return FAULT_CODE if any(pids or pids is None for pids in self.left.values()) else 0

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self, key: str, log_folder: str | None, now: float) -> list[Action]:
        """The first messages: prepare the job on every host. The key goes nowhere else."""
        self._timeout_at = now + self.timeout
        hosts = list(self.hosts.values())
        actions: list[Action] = []
        for host in hosts:
            bind: dict = {"address": host.address}
            if host == host_of(self.job, hosts, SCHEDULER):
                bind["scheduler"] = self.job.port
            if host == host_of(self.job, hosts, WORKER):
                bind["master"] = 0
            actions.append(Send(host.name, self.job_message(host.name, key=key, bind=bind, log_folder=log_folder)))
        return actions

    def job_message(self, host: str, **more: object) -> dict:
        """The first message to an agent of this job."""
        return dict(do="job", mark=self.job.mark, host=host, grace=self.grace, silence=self.silence, **more)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event; what is to be done about it."""
        match event:
            case Ready():
                return self._prepared(event)
            case Refused(_, message, code):
                return self._fail(Cause(code, message), now)
            case Started(_, task, pid):
                self.processes[task].pid = pid
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
            case Lost():
                return self._lost(event, now)
            case Interrupted(number):
                return self._interrupted(number, now)
            case OutputFailed(message):
                return self._fail(Cause(FAULT_CODE, message), now)
            case Tick():
                return self._tick(now)
        return []

    def _prepared(self, event: Ready) -> list[Action]:
        """When the last host is ready the ports are known, and every process can be told all it needs."""
        self._ready[event.host] = event
        if self.ending or self._ready.keys() != self.hosts.keys():
            return []
        ports: dict[str, int] = {}
        for ready in self._ready.values():
            ports.update(ready.ports)
        hosts = [replace(host, cores=self._ready[name].cores) for name, host in self.hosts.items()]
        self.processes = [Process(task) for task in tasks(self.job, hosts, Ports(**ports))]
        return [Send(host.name, self._start_message(host.name)) for host in hosts]

    def _start_message(self, host: str) -> dict:
        rows = [
            {
                "task": index,
                "argv": each.task.argv,
                "environment": each.task.environment,
                "workdir": self.job.workdir,
                "script": self.job.script,
                "listens": each.task.role == SCHEDULER,
            }
            for index, each in enumerate(self.processes)
            if each.task.host.name == host
        ]
        return {"do": "start", "unset": OWNED, "tasks": rows}

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
        if event.host in self.left:
            return []  # it had ended
        if event.host in self._recovering:
            self.left[event.host] = None
            return []
        pid = f" (pid {self._ready[event.host].pid})" if event.host in self._ready else ""
        self._recovering.add(event.host)
        actions = self._fail(Cause(FAULT_CODE, f"the agent on {event.host}{pid} {event.reason}"), now)
        self._give_up_at = now + self._patience
        return [Recover(event.host), *actions]

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
            text = f"the job took more than {self.timeout:g} s; not ended: {running}"
            return self._fail(Cause(TIMEOUT_CODE, text), now)
        if self.suspect and now >= self._suspect_at:
            return self._fail(self.suspect, now)
        return self._end(now) if now >= self._finish_at else []

    # -- the end -------------------------------------------------------------------------------------------------

    def _fail(self, cause: Cause, now: float) -> list[Action]:
        self.cause = self.cause or cause
        return [] if self.ending else self._end(now)

    def _end(self, now: float) -> list[Action]:
        """Ask every agent to end the job's processes; again, to hurry."""
        self.ending = True
        self._timeout_at = self._suspect_at = self._finish_at = math.inf
        self._give_up_at = now + self._patience
        asked = [name for name in self.hosts if name not in self.left and name not in self._recovering]
        return [Send(name, {"do": "stop", "grace": self.grace}) for name in asked]

    @property
    def _patience(self) -> float:
        return self.grace + KILL_SECONDS + ANSWER_SECONDS
