"""Which processes a job gets, at its start and while it runs, and the commands that start them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dmltrain_launch.agent.commands import Spawn, Start
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import OWNED, Job, workdir_of
from dmltrain_launch.job.role import SCHEDULER, WORKER
from dmltrain_launch.job.task import Ports, Task, newcomer, replacement, successor, tasks
from dmltrain_launch.run.supervisor.action import Send
from dmltrain_launch.run.supervisor.process import Process, Processes


class Starter:
    """Adds to `processes`. `ports`: those that processes connect to that are started from now on."""

    def __init__(self, job: Job, hosts: Sequence[Host], ports: Ports):
        self.job, self.ports = job, ports
        self.processes = Processes([Process(task) for task in tasks(job, list(hosts), ports)])

    def replace(self, number: int, host: Host) -> int:
        """Add the process that replaces the task `number`, to be started on `host`. Returns the new task's number."""
        lost = self.processes.all[number]
        task = replacement(self.job, lost.task, host, self._current, self._running, self.ports)
        return self._add(Process(task, replaces=lost))

    def succeed(self, number: int, host: Host) -> int:
        """Add the scheduler that takes the place of the task `number`. Returns the new task's number.

        It is to be started on `host`, after `on_port`.
        """
        lost = self.processes.all[number]
        return self._add(Process(replace(lost.task, host=host), replaces=lost))

    def on_port(self, number: int, port: int) -> None:
        """Give this port to the scheduler `number`, which is to be started, and to workers that are started later."""
        self.ports = replace(self.ports, scheduler=port, incarnation=self.ports.incarnation + 1)
        process = self.processes.all[number]
        newest = [lineage[-1] for lineage in self.processes.lineages]
        lost = [each.task for each in newest if each.lost and each.task.role != SCHEDULER]
        process.task = successor(self.job, process.task, process.task.host, self._current, lost, self.ports)

    @property
    def next_rank(self) -> int:
        """The rank of the next newcomer. Ranks of workers that are gone are not used again."""
        return 1 + max(worker.task.rank for worker in self.processes.workers)

    def add(self, host: Host) -> int:
        """Add one more worker, to be started on `host`. Returns the number of its task."""
        task = newcomer(self.job, self.next_rank, host, self._current, self._running, self.ports)
        return self._add(Process(task, newcomer=True))

    @property
    def _current(self) -> list[Task]:
        return [lineage[-1].task for lineage in self.processes.lineages]

    @property
    def _running(self) -> list[Task]:
        return [worker.task for worker in self.processes.workers if worker.runs]

    def _add(self, process: Process) -> int:
        if process.replaces:
            process.replaces.replaced_by = process
        self.processes.all.append(process)
        return len(self.processes.all) - 1

    # -- commands ------------------------------------------------------------------------------------------------

    def start_all(self, host: Host) -> Send:
        """Start the processes of `host`."""
        here = [number for number, process in enumerate(self.processes.all) if process.task.host.name == host.name]
        return self._start(host.name, here)

    def start(self, number: int) -> Send:
        """Start one process, on its host."""
        return self._start(self.processes.all[number].task.host.name, [number])

    def _start(self, host: str, numbers: Sequence[int]) -> Send:
        spawns = tuple(map(self._spawn, numbers))
        return Send(host, Start(OWNED, spawns, follows=bool(self.job.restart_scheduler)))

    def _spawn(self, number: int) -> Spawn:
        task = self.processes.all[number].task
        return Spawn(
            number,
            task.argv,
            dict(task.environment),
            workdir_of(self.job, task.host),
            self.job.script,
            listens=task.role == SCHEDULER,
            memory=self.job.memory.get(task.role, 0),
            leaves=task.role == WORKER and bool(self.job.elastic),
        )
