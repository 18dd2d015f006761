"""The state of a job's processes: started, running, ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dmltrain_launch.channels.exit_text import signal_name
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.job.task import Task
from dmltrain_launch.run.supervisor.limit import LOST_A_PEER


@dataclass(eq=False)
class Process:
    """A task and its state: `pid` is 0 before the start, `code` None before the end and -n after signal n.

    Times are in s from the start of the job. `lost`: the job goes on without it, since `lost_after`. `replaces`: the
    lost process whose place it takes; `replaced_by`: the process that takes its place. `newcomer`: it came to a running
    job, and is a member since `joined_after`. `leaving`: why it leaves on purpose, or ""; it left at `left_after`.
    """

    task: Task
    pid: int = 0
    code: int | None = None
    ended_by_us: bool = False
    lost: bool = False
    lost_after: float = 0.0
    replaces: Process | None = None
    replaced_by: Process | None = field(default=None, repr=False)  # which names this one
    newcomer: bool = False
    joined_after: float | None = None
    leaving: str = ""
    left_after: float | None = None

    @property
    def joins(self) -> bool:
        """Whether it was started while the others ran."""
        return self.newcomer or self.replaces is not None

    @property
    def comes(self) -> bool:
        """Whether it is a newcomer that is not a member yet."""
        return self.newcomer and self.joined_after is None

    @property
    def left(self) -> bool:
        """Whether it has left on purpose."""
        return self.code == 0 and bool(self.leaving)

    @property
    def left_with_host(self) -> bool:
        """Whether it is a server or the scheduler of a host that leaves. For the job that is a loss."""
        return self.code is not None and bool(self.leaving) and self.task.role != WORKER

    @property
    def needed(self) -> bool:
        """Whether it is replaced if it is lost: not if it leaves anyway, or was not a member yet."""
        return not self.leaving and not self.comes

    @property
    def runs(self) -> bool:
        return self.code is None and not self.lost

    @property
    def may_fail(self) -> bool:
        """Whether it may be the process that others have lost, so that its end explains their exits."""
        return self.runs and not self.comes and not self.leaving

    @property
    def label(self) -> str:
        pid = f"pid {self.pid} " if self.pid else ""
        return f"{self.task.role} {self.task.rank} ({pid}on {self.task.host.name})"

    @property
    def fate(self) -> str:
        if self.left_with_host:
            return f"{self.label} has ended, because its host leaves the job"
        if self.code is None:
            return f"{self.label} was lost" if self.lost else f"{self.label} has not ended"
        if self.code < 0:
            return f"{self.label} was killed by {signal_name(-self.code)}"
        meaning = " (it lost another process of the job)" if self.code == LOST_A_PEER else ""
        return f"{self.label} exited with code {self.code}{meaning}"


class Processes:
    """All processes in launch order, then others as they start (starter.py). A task's number is its index."""

    def __init__(self, processes: list[Process]):
        self.all = processes

    @property
    def started(self) -> bool:
        return all(process.pid or process.lost or process.joins for process in self.all)

    @property
    def ended(self) -> bool:
        return all(process.code is not None or process.lost for process in self.all)

    @property
    def workers_done(self) -> bool:
        """Whether all workers that are not lost have exited 0, and there is one."""
        return self.a_worker_done and all(worker.code == 0 or worker.lost for worker in self.workers)

    @property
    def a_worker_done(self) -> bool:
        """Whether a worker has exited with 0, and not left on purpose: the others will soon."""
        return any(worker.code == 0 and not worker.lost and not worker.leaving for worker in self.workers)

    @property
    def workers(self) -> list[Process]:
        return [process for process in self.all if process.task.role == WORKER]

    @property
    def scheduler_done(self) -> bool:
        """Whether the scheduler has exited with 0: all workers that it has not removed have left."""
        return any(process.code == 0 for process in self.all if process.task.role == SCHEDULER)

    @property
    def workers_left(self) -> int:
        return sum(not worker.lost and not worker.left for worker in self.workers)

    @property
    def servers(self) -> list[Process]:
        return [process for process in self.all if process.task.role == SERVER]

    @property
    def servers_left(self) -> int:
        return sum(not server.lost for server in self.servers)

    def keeps_a_server(self, lost: Sequence[Process]) -> bool:
        """Whether a server is left when these processes are lost, or none of them is a server."""
        left = [server for server in self.servers if not server.lost and server.code in (None, 0)]
        return bool(set(left).difference(lost)) or not set(self.servers).intersection(lost)

    @property
    def scheduler_lives(self) -> bool:
        return any(process.runs for process in self.all if process.task.role == SCHEDULER)

    @property
    def only_replacements_left(self) -> bool:
        """Whether only workers still run that were started later: replacements and newcomers."""
        left = [worker for worker in self.workers if worker.runs]
        return bool(left) and all(process.joins for process in left)

    def starting_on(self, host: str) -> Process | None:
        """The replacement or newcomer that is to start on `host` next, in the order in which its agent was asked."""
        starting = [process for process in self.on(host) if process.joins and not process.pid and not process.lost]
        return next(iter(starting), None)

    @property
    def lineages(self) -> list[list[Process]]:
        """For each role and rank, in launch order: its first process, the replacement of that one, and so on."""
        lineages = []
        for first in self.all:
            if not first.replaces:
                lineages.append([first])
                while following := lineages[-1][-1].replaced_by:
                    lineages[-1].append(following)
        return lineages

    def on(self, host: str) -> list[Process]:
        return [process for process in self.all if process.task.host.name == host]

    @property
    def running(self) -> str:
        """The processes that have not ended, as text."""
        return ", ".join(process.label for process in self.all if process.runs)

    @property
    def not_started(self) -> str:
        return ", ".join(process.label for process in self.all if not process.pid)

    def label_of(self, pid: int, task: int | None, host: str) -> str:
        """The label of the process `pid`, which is `task` or its descendant, for messages."""
        if task is None:
            return f"a process (pid {pid} on {host})"
        label = self.all[task].label
        return label if self.all[task].pid == pid else f"a descendant (pid {pid}) of {label}"
