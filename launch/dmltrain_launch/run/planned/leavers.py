"""Workers that leave an elastic job on purpose, and hosts that it gives back. Pure.

A worker that got its notice ends its step, hands back its samples and exits with 0: it is neither lost nor replaced.
When the last worker of a leaving host has ended, a server or the scheduler on it is ended as well. The job goes on as
after their loss: with the other servers, and with another scheduler on another host. Then the host is given back: its
agent ends, and no process is started there any more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import NoticeCommand
from dmltrain_launch.job.role import SCHEDULER, WORKER
from dmltrain_launch.run.planned.arrivals import Key
from dmltrain_launch.run.planned.waiters import Waiter, Waiters
from dmltrain_launch.run.supervisor.action import Action, Send
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.limit import FAULT_CODE
from dmltrain_launch.run.supervisor.process import Process

ONE = re.compile(r"worker[:-](\d{1,6})")


def leaves(task: int) -> Key:
    """The key of a request that waits for a worker to leave."""
    return "leaves", task


def released(host: str) -> Key:
    """The key of a request that waits for a host to be given back."""
    return "released", host


class Leavers:
    """Workers that leave and hosts that are given back. `waiters`: the requests that wait for them."""

    def __init__(self, attempt: Attempt, waiters: Waiters):
        self._attempt, self._waiters = attempt, waiters
        self._hosts: set[str] = set()  # to be given back when their processes have ended
        self._members: list[Process] | None = None  # of the last view; None before the first

    def remove(self, what: str, waiter: Waiter, reason: str, now: float) -> list[Action]:
        """Let `what` leave: hosts, and workers such as worker:3. LaunchError if it cannot be done."""
        hosts, workers = self._chosen(what)
        self._check_hosts(hosts)
        for worker in workers:
            if worker.comes:
                raise LaunchError(f"{worker.label} has not joined the job yet: remove it when it has")
        self._check_number(workers)
        waiter.keys.update(released(host) for host in hosts)
        self.release(hosts, now)
        return self._notice(workers, waiter, reason)

    def release(self, hosts: Collection[str], now: float) -> None:
        """Give these hosts back when their processes have ended. Nothing is started there from now on."""
        attempt = self._attempt
        self._hosts.update(hosts)
        attempt.ending.leaving.update(hosts)
        for host in hosts:
            for text in attempt.replacer.host_lost(host, attempt.tasks, attempt.usable, now):
                self._attempt.announce(text)

    def viewed(self, ranks: Collection[int]) -> None:
        """A view has begun with these workers as its members."""
        self._members = [worker for worker in self._attempt.tasks.workers if worker.runs and worker.task.rank in ranks]

    def noticed(self, host: str, tasks: Sequence[int], now: float) -> None:
        """The agent of a host got a signal and has asked these workers to leave."""
        for process in (self._attempt.processes[task] for task in tasks):
            process.leaving = process.leaving or f"the agent on {host} got a notice"
        names = ", ".join(self._attempt.processes[task].label for task in tasks)
        self._attempt.announce(f"the agent on {host} got a notice: asked to leave: {names}")
        # if the job needs the host for a server or the scheduler, the host stays in use until it is lost
        with contextlib.suppress(LaunchError):
            self._check_hosts([host])
            self.release([host], now)

    def leaving(self, rank: int, reason: str) -> None:
        """The scheduler says that this worker leaves."""
        for worker in self._attempt.tasks.workers:
            if worker.task.rank == rank and not worker.lost and not worker.replaced_by:
                if not worker.leaving:
                    self._attempt.announce(f"{worker.label} leaves the job: {reason}")
                worker.leaving = worker.leaving or reason

    def left(self, process: Process, after: float) -> None:
        """A worker has left, so many seconds after the job's start."""
        process.left_after = after
        number = self._attempt.tasks.workers_left
        left = f"{number} worker{' is' if number == 1 else 's are'} left"
        self._attempt.announce(f"{process.label} has left the job; {left}")

    def give_back(self) -> list[Action]:
        """End servers and scheduler of the hosts whose workers have ended, then the agents."""
        actions = list[Action]()
        for host in sorted(self._hosts):
            running = [process for process in self._attempt.tasks.on(host) if process.runs]
            if not running:
                self._hosts.discard(host)
                actions += self._attempt.ending.release(host)
            elif all(process.task.role != WORKER for process in running):
                actions += self._end(host, [process for process in running if not process.leaving])
        return actions

    def _end(self, host: str, processes: Sequence[Process]) -> list[Action]:
        for process in processes:
            process.leaving = "its host leaves"
        numbers = tuple(self._attempt.processes.index(process) for process in processes)
        return [Send(host, NoticeCommand(numbers))] if numbers else []

    # -- requests ------------------------------------------------------------------------------------------------

    def _chosen(self, what: str) -> tuple[list[str], list[Process]]:
        """The hosts and the running workers that are named, those on the hosts included."""
        hosts: list[str] = []
        workers: list[Process] = []
        for name in (word.strip() for word in what.split(",")):
            match = ONE.fullmatch(name)
            named = self._on(name) if not match else self._with_rank(int(match[1]))
            hosts += [] if match else [name]
            workers += [process for process in named if process not in workers]
        return hosts, workers

    def _on(self, host: str) -> list[Process]:
        known = [used_host.name for used_host in self._attempt.usable]
        if host not in known:
            raise LaunchError(f"{host!r} is not a host that the job uses: expected {', '.join(known)}, or worker:N")
        return [process for process in self._attempt.tasks.on(host) if process.task.role == WORKER and process.runs]

    def _with_rank(self, rank: int) -> list[Process]:
        running = [worker for worker in self._attempt.tasks.workers if worker.runs]
        chosen = [process for process in running if process.task.rank == rank]
        if not chosen:
            names = ", ".join(f"worker:{each}" for each in sorted(process.task.rank for process in running))
            raise LaunchError(f"worker {rank} does not run: expected one of {names}, or a host")
        return chosen

    def _check_hosts(self, hosts: Collection[str]) -> None:
        """LaunchError if the job cannot go on without the servers and the scheduler on these hosts."""
        attempt = self._attempt
        ending = [process for host in hosts for process in attempt.tasks.on(host) if process.runs]
        if not attempt.tasks.keeps_a_server(ending):
            raise LaunchError(f"no server would be left without {' and '.join(sorted(hosts))}: {self._alone(hosts)}")
        if not any(process.task.role == SCHEDULER for process in ending):
            return
        if all(host.name in hosts for host in attempt.usable):
            raise LaunchError(f"no host would be left for the scheduler: {self._alone(hosts)}")
        if attempt.succession.used_up:
            most = attempt.policy.schedulers
            raise LaunchError(
                f"the scheduler would be started on another host, which is more than --restart-scheduler {most}: "
                f"{self._alone(hosts)}"
            )

    def _alone(self, hosts: Collection[str]) -> str:
        """What to do instead of removing these hosts."""
        workers = ",".join(f"worker:{process.task.rank}" for host in sorted(hosts) for process in self._on(host))
        return f"remove their workers alone ({workers}), or name other hosts" if workers else "name other hosts"

    def _check_number(self, workers: Sequence[Process]) -> None:
        members = self._attempt.tasks.workers if self._members is None else self._members
        running = [member for member in members if member.runs and not member.comes]
        stay = [process for process in running if process not in workers and not process.leaving]
        least = self._attempt.job.elastic
        if len(stay) < max(1, least):
            raise LaunchError(
                f"{len(stay)} worker{' would be' if len(stay) == 1 else 's would be'} left, and --min-workers is "
                f"{least}: add others first, or end the job with dmltrain job kill"
            )

    def _notice(self, workers: Sequence[Process], waiter: Waiter, reason: str) -> list[Action]:
        attempt = self._attempt
        by_host: dict[str, list[int]] = {}
        for worker in workers:
            number = attempt.processes.index(worker)
            waiter.keys.add(leaves(number))
            if not worker.leaving:
                worker.leaving = reason
                by_host.setdefault(worker.task.host.name, []).append(number)
        if workers:
            self._attempt.announce(f"asked to leave the job: {', '.join(worker.label for worker in workers)}")
        return [Send(host, NoticeCommand(tuple(tasks))) for host, tasks in by_host.items()]

    def settle(self) -> None:
        """Tell those who wait what has become of workers and hosts."""
        for key in self._waiters.keys:
            match key:
                case ("leaves", int(task)):
                    self._settle(task)
                case ("released", str(host)) if self._attempt.ending.has_ended(host):
                    self._waiters.settle(key, f"{host} is not part of the job any more")
                case _:
                    pass

    def _settle(self, task: int) -> None:
        key, process = leaves(task), self._attempt.processes[task]
        if process.left:
            self._waiters.settle(key, f"worker {process.task.rank} has left the job")
        elif not process.runs:
            self._waiters.settle(key, f"{process.fate}, before it had left", FAULT_CODE, task)
