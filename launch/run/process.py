"""The state of a job's processes: started, running, ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.agent.commands import Spawn, Start
from launch.channels.exit_text import signal_name
from launch.job.host import Host
from launch.job.job import OWNED, Job, Ports, Task, tasks, workdir_of
from launch.job.role import SCHEDULER, WORKER
from launch.run.limit import LOST_A_PEER


@dataclass
class Process:
    """A task and its state: `pid` is 0 before the start, `code` None before the end and -n after signal n."""

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
        meaning = " (it lost another process of the job)" if self.code == LOST_A_PEER else ""
        return f"{self.label} exited with code {self.code}{meaning}"


class Processes:
    """All processes in launch order. A task's number is its index."""

    def __init__(self, job: Job, hosts: Sequence[Host], ports: Ports):
        self.job = job
        self.all = [Process(task) for task in tasks(job, list(hosts), ports)]

    @property
    def started(self) -> bool:
        return all(each.pid for each in self.all)

    @property
    def ended(self) -> bool:
        return all(each.code is not None for each in self.all)

    @property
    def workers_done(self) -> bool:
        """Whether all workers have exited 0."""
        return all(each.code == 0 for each in self.all if each.task.role == WORKER)

    @property
    def running(self) -> str:
        """The processes that have not ended, as text."""
        return ", ".join(each.label for each in self.all if each.code is None)

    @property
    def not_started(self) -> str:
        return ", ".join(each.label for each in self.all if not each.pid)

    def label_of(self, pid: int, task: int | None, host: str) -> str:
        """The label of the process `pid`, which is `task` or its descendant, for messages."""
        if task is None:
            return f"a process (pid {pid} on {host})"
        label = self.all[task].label
        return label if self.all[task].pid == pid else f"a descendant (pid {pid}) of {label}"

    def start_command(self, host: Host) -> Start:
        """The command that starts the processes of `host`."""
        rows = tuple(
            Spawn(
                index,
                each.task.argv,
                dict(each.task.environment),
                workdir_of(self.job, host),
                self.job.script,
                listens=each.task.role == SCHEDULER,
                memory=self.job.memory.get(each.task.role, 0),
            )
            for index, each in enumerate(self.all)
            if each.task.host.name == host.name
        )
        return Start(OWNED, rows)
