"""Workers that come to a running elastic job, on hosts of the job or on new ones. Pure.

A new host is prepared (late.py), and then its workers are started. They have new numbers, never those of others. A host
that cannot be prepared changes nothing for the job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import events
from dmltrain_launch.agent.commands import Stop
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import MORE_WORKERS
from dmltrain_launch.job.role import WORKER
from dmltrain_launch.run.planned.waiters import Waiter, Waiters
from dmltrain_launch.run.supervisor.action import Action, Connect, Open, Send
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.event import Connected, Copied, Event, Lost, Unreached
from dmltrain_launch.run.supervisor.late import LatePreparation, PeerPorts, bound
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, TIMEOUT_CODE, USAGE_CODE

Key = tuple[str, str | int]


def comes(host: str) -> Key:
    """The key of a request that waits for a host that is being prepared."""
    return "comes", host


def joins(task: int) -> Key:
    """The key of a request that waits for a worker to join."""
    return "joins", task


@dataclass
class _Arrival:
    preparation: LatePreparation
    workers: int
    until: float  # s
    connected: bool = False


class Arrivals:
    """Hosts that are being prepared, and workers that are started on them. `waiters`: the requests that wait for
    them."""

    def __init__(self, attempt: Attempt, waiters: Waiters):
        self._attempt, self._waiters = attempt, waiters
        self._coming: dict[str, _Arrival] = {}
        # hosts that were given up while the launcher connects to them: an agent may still come, and must be ended
        self._unwanted: set[str] = set()
        self._peer_ports = PeerPorts()

    @property
    def deadline(self) -> float:
        return min((arrival.until for arrival in self._coming.values()), default=math.inf)

    def is_coming(self, host: str) -> bool:
        return host in self._coming

    @property
    def expected(self) -> int:
        """How many workers will be started on hosts that are being prepared."""
        return sum(arrival.workers for arrival in self._coming.values())

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, more: int) -> None:
        """LaunchError if the job cannot have `more` workers in addition."""
        job = self._attempt.job
        if self._attempt.starter.next_rank + self.expected + more > job.num_workers + MORE_WORKERS:
            raise LaunchError(f"a job can get at most {MORE_WORKERS} workers more than it had at its start")
        if more > self.room:
            raise LaunchError(
                f"{more} workers more: the job has {self._now} of the {job.most_workers} that -n N:M allows; "
                "add fewer, or remove others first"
            )

    @property
    def _now(self) -> int:
        """How many workers there are, or will be soon."""
        stay = sum(worker.runs and not worker.leaving for worker in self._attempt.tasks.workers)
        return stay + self._attempt.replacer.waiting + self.expected

    @property
    def room(self) -> float:
        """How many workers more -n N:M allows; math.inf if it does not limit them."""
        most = self._attempt.job.most_workers
        return max(0, most - self._now) if most else math.inf

    @property
    def missing(self) -> int:
        """How many workers fewer there are than the most that -n allows."""
        return max(0, (self._attempt.job.most_workers or self._attempt.job.num_workers) - self._now)

    def add(self, host: Host, workers: int, waiter: Waiter, now: float) -> list[Action]:
        """Start `workers` more workers on this host, which is prepared first if the job does not use it yet."""
        attempt = self._attempt
        if host.name in self._coming:
            waiter.note(f"{host.name} is being added already: add more workers when it is there", USAGE_CODE)
            return []
        if any(used_host.name == host.name for used_host in attempt.usable):
            keys, actions = self._start(attempt.hosts[host.name], workers)
            waiter.keys.update(keys)
            return actions
        if not attempt.job.over_network:
            waiter.note(
                f"{host.name}: this job runs on this machine only: name localhost, or a number of workers; "
                "for other hosts start a job with -H or --hosts",
                USAGE_CODE,
            )
            return []
        if host.name in attempt.hosts and not attempt.ending.may_be_reused(host.name):
            waiter.note(f"{host.name} cannot be used now: the job still ends what ran there; try again", FAULT_CODE)
            return []
        return self._begin(host, workers, waiter, now)

    def place(self, workers: int, waiter: Waiter) -> list[Action]:
        """Start `workers` more workers on hosts of the job: each on the host with the fewest workers of those with
        room."""
        actions: list[Action] = []
        for _ in range(workers):
            attempt = self._attempt
            fitting = [seat for seat in attempt.replacer.seats(attempt.usable, attempt.tasks) if seat.free >= 1]
            if not fitting:
                waiter.note("no host of the job has room for one more worker: name a host", USAGE_CODE)
                break
            host = min(fitting, key=lambda seat: seat.workers).host
            keys, started = self._start(attempt.hosts[host], 1)
            waiter.keys.update(keys)
            actions += started
        return actions

    def _begin(self, host: Host, workers: int, waiter: Waiter, now: float) -> list[Action]:
        attempt = self._attempt
        attempt.ending.reuse(host.name)
        attempt.ending.coming.add(host.name)
        attempt.preparation.hosts[host.name] = host
        servers = {
            process.task.host.name for process in attempt.processes if process.task.role != WORKER and process.runs
        }
        self._peer_ports.hosts = {
            used_host.name: used_host for used_host in attempt.usable if used_host.name in servers
        }
        late = LatePreparation(attempt.job, host, attempt.preparation, self._peer_ports)
        self._coming[host.name] = _Arrival(late, workers, now + attempt.limits.start)
        waiter.keys.add(comes(host.name))
        return [] if host.name in self._unwanted else [Connect(host.name)]

    # -- a new host ----------------------------------------------------------------------------------------------

    def connected(self, host: str) -> None:
        if host in self._coming:
            self._coming[host].connected = True

    def prepared(self, event: events.Event | Copied) -> list[Action]:
        """A coming host has finished a step, or a host of the job that it must reach listens now."""
        arrival = self._coming.get(event.host)
        if arrival is None:
            if not isinstance(event, events.Bound):
                return []
            actions = bound(event, self._peer_ports, [arrival.preparation for arrival in self._coming.values()])
            return [*actions, *self._proceed()]
        try:
            actions = arrival.preparation.handle(event)
        except LaunchError as error:
            return self.failed(event.host, str(error), error.code)
        return [*actions, *self._proceed()]

    def failed(self, name: str, why: str, code: int) -> list[Action]:
        """Give up a coming host: tell the user and the requests that wait for it, and end its agent."""
        arrival = self._coming.pop(name, None)
        if arrival is None:
            return []
        attempt = self._attempt
        attempt.ending.coming.discard(name)
        text = f"{name} was not added: {why}"
        self._waiters.settle(comes(name), text, code or FAULT_CODE)
        attempt.announce(text)
        actions: list[Action] = []
        if arrival.connected:
            actions += attempt.ending.release(name)
        else:
            del attempt.preparation.hosts[name]
        return [*actions, *self._close()]

    def give_up(self, name: str, why: str, code: int) -> list[Action]:
        """Do not wait for this host any more. If the launcher still connects to it, an agent may come later."""
        if not self._coming[name].connected:
            self._unwanted.add(name)
        return self.failed(name, why, code)

    def is_unwanted(self, event: Event) -> bool:
        """Whether an event is about a host that was given up before its agent was connected."""
        return getattr(event, "host", None) in self._unwanted

    def unwanted(self, event: Event) -> list[Action]:
        """Handle an event of such a host: end its agent. If the host was added again meanwhile, connect to it anew."""
        match event:
            case Connected(host):
                return [Send(host, Stop(self._attempt.ending.grace))]
            case Unreached(host) | Lost(host):
                self._unwanted.discard(host)
                if host in self._coming and not self._attempt.ending.begun:
                    return [Connect(host)]
        return []

    def lost(self, name: str, why: str) -> list[Action]:
        """The agent of a coming host is lost. No process of the job ran there, so none is left."""
        self._attempt.ending.left[name] = ()
        self._attempt.ending.closed.add(name)
        return self.failed(name, why, FAULT_CODE)

    def peer_lost(self, name: str) -> list[Action]:
        """A host of the job is lost: coming hosts need not reach it any more."""
        self._peer_ports.lost(name)
        actions = [action for arrival in self._coming.values() for action in arrival.preparation.answered(name)]
        return [*actions, *self._proceed()]

    def tick(self, now: float) -> list[Action]:
        """Give up hosts that take too long."""
        late = [name for name, arrival in self._coming.items() if now >= arrival.until]
        seconds = self._attempt.limits.start
        return [
            action
            for name in late
            for action in self.give_up(name, f"it was not ready within {seconds:g} s (--start-timeout)", TIMEOUT_CODE)
        ]

    def _proceed(self) -> list[Action]:
        """Start the workers of the hosts that are prepared."""
        actions: list[Action] = []
        for name, arrival in list(self._coming.items()):
            if arrival.preparation.done:
                del self._coming[name]
                self._attempt.ending.coming.discard(name)
                main, late = self._attempt.preparation, arrival.preparation
                main.hosts[name] = late.host
                main.agents.update(late.agents)
                main.facts.update(late.facts)
                main.problems += late.problems
                keys, started = self._start(late.host, arrival.workers)
                self._waiters.swap(comes(name), keys)
                actions += started
        return [*actions, *self._close()]

    def _close(self) -> list[Action]:
        return [] if self._coming else self._peer_ports.close()

    def _start(self, host: Host, workers: int) -> tuple[list[Key], list[Action]]:
        """Start workers on a prepared host. Returns the keys of who waits for them to join, and the actions."""
        starter, keys, actions = self._attempt.starter, list[Key](), list[Action]()
        for _ in range(workers):
            number = starter.add(host)
            task = starter.processes.all[number].task
            keys.append(joins(number))
            actions += [Open(task.name), starter.start(number)]
            self._attempt.announce(f"starting worker {task.rank} on {host.name}")
        return keys, actions
