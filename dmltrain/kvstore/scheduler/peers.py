"""What the scheduler knows of the processes that have registered: where each is, whether it still runs, which barriers
the workers have reached, and which worker computes longest. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dmltrain.kvstore.scheduler.actions import Action, Log
from dmltrain.kvstore.scheduler.lost_links import Node
from dmltrain.kvstore.scheduler.reports import Slowest
from dmltrain.kvstore.transport.message.job import Register, ServerAddress, Start, WorkerAddress


@dataclass
class Peer:
    registration: Register
    heard: float  # s
    done: bool = False  # its worker has finished
    left: bool = False  # the process has ended on purpose: the end of its connection is no loss


class Peers(dict[Node, Peer]):
    """Those of a job that starts with so many `workers` and `servers`. In an elastic job, workers with ranks below
    `ranks` may come in addition."""

    def __init__(self, workers: int, servers: int, ranks: int) -> None:
        self.workers, self.servers, self.ranks = workers, servers, max(workers, ranks)

    @property
    def expected(self) -> list[Node]:
        """The processes of the start."""
        return [*(("server", number) for number in range(self.servers)), *self.of_workers]

    @property
    def of_workers(self) -> list[Node]:
        """The workers of the start."""
        return [("worker", rank) for rank in range(self.workers)]

    @property
    def missing(self) -> str:
        """The names of the processes of the start that have not registered."""
        return ", ".join(name_of(node) for node in self.expected if node not in self)

    @property
    def finished(self) -> list[int]:
        """The workers of the start that have finished."""
        return [rank for role, rank in self.of_workers if self.done((role, rank))]

    def may_come_later(self, node: Node) -> bool:
        """Whether a process with this rank may come in addition to those of the start."""
        return node[0] == "worker" and self.workers <= node[1] < self.ranks

    def done(self, node: Node) -> bool:
        return node in self and self[node].done

    def host(self, node: Node) -> Node | str:
        """An identifier that is equal for all processes of a host; a process without `host_id` has its own."""
        peer = self.get(node)
        return peer.registration.host_id or node if peer else node

    def hosts(self, ranks: int) -> list[tuple[int, ...]]:
        """The workers that have registered with ranks below this, by host."""
        hosts: dict[Node | str, list[int]] = {}
        for rank in range(ranks):
            if ("worker", rank) in self:
                hosts.setdefault(self.host(("worker", rank)), []).append(rank)
        return [tuple(host) for host in hosts.values()]

    def describe(self, node: Node) -> str:
        """The process and its host, for messages."""
        host = self[node].registration.host_name or self[node].registration.host
        return f"{name_of(node)} on {host}" if host else name_of(node)

    def address(self, server: int) -> ServerAddress:
        registration = self["server", server].registration
        return ServerAddress(
            registration.host, registration.port, registration.socket_name, registration.host_id, registration.host_name
        )

    def start(self, facts: Mapping[str, Any]) -> Start:
        """The message to all processes when those of the start have registered."""
        registered = [self[node].registration for node in self.of_workers]
        return Start(
            tuple(self.address(number) for number in range(self.servers)),
            tuple(
                WorkerAddress(registration.socket_name, registration.host_id, registration.host_name)
                for registration in registered
            ),
            dict(facts),
        )


def name_of(node: Node) -> str:
    return f"{node[0]} {node[1]}"


@dataclass
class OpenBarrier:
    name: str
    since: float  # s, when the first worker reached it
    missing: set[int]


@dataclass
class Barriers:
    """The barriers of these workers: all, or the members of a view. A barrier is open from the moment at which the
    first worker reaches it until the last one does."""

    workers: Collection[int]
    _open: dict[str, OpenBarrier] = field(default_factory=dict)

    def reach(self, name: str, worker: int, now: float) -> OpenBarrier:
        """A worker reaches this barrier. The barrier is complete if no worker is `missing` in the result."""
        barrier = self._open.setdefault(name, OpenBarrier(name, now, set(self.workers)))
        barrier.missing.discard(worker)
        if not barrier.missing:
            del self._open[name]
        return barrier

    def overdue(self, since: float) -> OpenBarrier | None:
        """A barrier that was opened before `since`, if any."""
        return next((barrier for barrier in self._open.values() if barrier.since < since), None)

    def why_hanging(self, finished: Collection[int]) -> str:
        """Why an open barrier can never be complete, if these workers have finished; empty if all can be."""
        for barrier in self._open.values():
            for worker in sorted(barrier.missing.intersection(finished)):
                return f"barrier {barrier.name!r}: worker {worker} has finished and will not reach it"
        return ""


class StepTimes:
    """How much longer the slowest worker computes in a step than the median of all. It is said each time when all
    workers have reported since the last time; the launcher applies the job's rules to it."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by worker

    def take(self, worker: int, seconds: float, workers: Iterable[int]) -> list[Action]:
        """A worker computes for `seconds` in a step. `workers`: those that the job has now."""
        self._seconds[worker] = seconds
        present = {*workers}
        if worker not in present or not present <= self._seconds.keys():
            return []
        reported = {rank: self._seconds[rank] for rank in present}
        self._seconds.clear()
        median = statistics.median(reported.values())
        slowest = max(reported, key=lambda rank: reported[rank])
        more = f"{100 * (reported[slowest] / median - 1):.1f}"
        text = f"worker {slowest} computes {more} % longer in a step than the median of {median:.4g} s"
        return [Log(text, Slowest(slowest, float(more)))]
