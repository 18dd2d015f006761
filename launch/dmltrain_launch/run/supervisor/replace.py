"""Replaces lost workers and servers of an elastic job: replacements.py for its processes and hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.placement import free_slots, slots_for
from dmltrain_launch.job.role import SERVER, WORKER
from dmltrain_launch.run.supervisor.action import Action, Continue
from dmltrain_launch.run.supervisor.policy import Policy
from dmltrain_launch.run.supervisor.process import Process, Processes
from dmltrain_launch.run.supervisor.replacements import HostSlots, Replacement, Replacements
from dmltrain_launch.run.supervisor.starter import Starter


class Replacer:
    """Plans replacements when workers and servers are lost, and starts those that are due.

    Workers and servers have separate limits and separate waiting lists. A server that fits on no host waits until a
    host has room for it. A worker does not wait, because a host that comes brings workers of its own. Methods return
    texts for the user.
    """

    def __init__(self, job: Job, policy: Policy):
        self.job = job
        self.replacements = Replacements(policy.workers)  # of workers
        self.of_servers = Replacements(policy.servers)
        self._unplaced: list[int] = []  # lost servers for which no host has room, by the numbers of their processes

    @property
    def next_at(self) -> float:
        """When `start` has something to do; math.inf if nothing waits."""
        return min(self.replacements.next_at, self.of_servers.next_at)

    @property
    def waiting(self) -> int:
        """How many replacements of workers are planned and have not been started."""
        return len(self.replacements.waiting)

    def may_replace(self, tasks: Processes) -> bool:
        """Whether a server that is lost now can be replaced, or another one will be."""
        wanted = not tasks.a_worker_done
        return wanted and bool(self.of_servers.waiting or not self.of_servers.used_up)

    def lost(self, lost: Sequence[Process], tasks: Processes, usable: Sequence[Host], now: float) -> list[str]:
        """These processes were lost. `usable`: the hosts on which processes can be started, in the job's order."""
        losses = [process for process in lost if process.task.role in (SERVER, WORKER)]
        for process in losses:
            self._of(process).lost(tasks.all.index(process), process.task.host.name, now)
        if tasks.a_worker_done or not tasks.scheduler_lives:
            return []  # at the end of the job nobody is needed
        return [self._plan(loss, tasks, usable, now) for loss in losses if loss.needed and self._of(loss).most]

    def host_lost(self, name: str, tasks: Processes, usable: Sequence[Host], now: float) -> list[str]:
        """A host is lost: plan the replacements that waited for it again, on other hosts."""
        dropped = [*self.replacements.drop(name), *self.of_servers.drop(name)]
        return [self._plan(tasks.all[replacement.task], tasks, usable, now) for replacement in dropped]

    def place_servers(self, tasks: Processes, usable: Sequence[Host], now: float) -> list[str]:
        """Plan the replacements of servers that fitted on no host before and fit now."""
        if not self._unplaced or tasks.a_worker_done or not tasks.scheduler_lives:
            return []
        before, self._unplaced = self._unplaced, []
        texts = [self._plan(tasks.all[number], tasks, usable, now) for number in before]
        return [text for number, text in zip(before, texts, strict=True) if number not in self._unplaced]

    def cancel(self) -> None:
        """The job ends: drop all replacements that wait."""
        self.replacements.drop()
        self.of_servers.drop()
        self._unplaced.clear()

    def start(self, starter: Starter, hosts: Mapping[str, Host], now: float) -> list[Action]:
        """Start what is due."""
        actions: list[Action] = []
        for replacements in (self.of_servers, self.replacements):
            for replacement in replacements.due(now):
                number = starter.replace(replacement.task, hosts[replacement.host])
                replacements.started(number, replacement.host, now)
                actions += [Continue(replacement.task), starter.start(number)]
        return actions

    def _of(self, process: Process) -> Replacements:
        return self.of_servers if process.task.role == SERVER else self.replacements

    def _plan(self, lost: Process, tasks: Processes, usable: Sequence[Host], now: float) -> str:
        role, replacements = lost.task.role, self._of(lost)
        name, most = f"{role} {lost.task.rank}", replacements.most
        if replacements.used_up:
            return f"{name} is not replaced: this would be more than --restart-{role}s {most}"
        seats = self.seats(usable, tasks) if role == WORKER else self._seats_of_servers(usable, tasks)
        planned = replacements.plan(tasks.all.index(lost), lost.task.host.name, seats, now)
        if planned is None and role == SERVER:
            self._unplaced.append(tasks.all.index(lost))
            return f"{name} is not replaced until a host comes that has room for it"
        if planned is None:
            return f"{name} is not replaced: no host that is left has room for it"
        return f"starting the replacement of {name} on {_where_and_when(planned, now)}, {planned.number} of {most}"

    def seats(self, usable: Sequence[Host], tasks: Processes) -> list[HostSlots]:
        """The hosts that take workers, with their room for more."""
        return [self._seat(host, tasks) for host in usable if self._takes_workers(host, tasks)]

    def _seat(self, host: Host, tasks: Processes) -> HostSlots:
        running = sum(worker.runs for worker in tasks.workers if worker.task.host.name == host.name)
        workers = running + sum(replacement.host == host.name for replacement in self.replacements.waiting)
        return HostSlots(host.name, workers, free_slots(host, workers))

    def _takes_workers(self, host: Host, tasks: Processes) -> bool:
        """--placement dedicated keeps workers off the hosts of servers."""
        return self.job.placement != "dedicated" or all(process.task.role != SERVER for process in tasks.on(host.name))

    def _seats_of_servers(self, usable: Sequence[Host], tasks: Processes) -> list[HostSlots]:
        """The hosts that take servers, with their room for more."""
        seats = []
        for host in usable:
            here = [process for process in tasks.on(host.name) if process.runs]
            servers = sum(process.task.role == SERVER for process in here)
            servers += sum(replacement.host == host.name for replacement in self.of_servers.waiting)
            dedicated = self.job.placement == "dedicated" and any(process.task.role == WORKER for process in here)
            if not dedicated:
                seats.append(HostSlots(host.name, servers, slots_for(host, SERVER) - servers))
        return seats


def _where_and_when(planned: Replacement, now: float) -> str:
    return f"{planned.host} in {planned.at - now:.0f} s"
