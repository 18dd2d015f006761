"""The scheduler's decisions: registration, barriers, lost processes, the end of the job. Pure; process.py does the I/O.

Theory of operation. Every process connects, registers and sends a heartbeat each second. The scheduler answers each
heartbeat, so that processes also notice a frozen scheduler. When all have registered, it sends `start` to all, with the
servers' addresses and each process's host. A barrier is the set of workers that have reached it. A worker sends `bye`
when it has finished; after the last `bye` the scheduler sends `shutdown` to all. The job is lost when a process misses
heartbeats for `lost_seconds`, its connection ends without `bye`, it sends `abort`, a link between two processes is lost
(lost_links.py), or a time limit passes. The scheduler then sends `abort` to all, with a reason that names the process,
or both ends of the link. What follows from a lost link, such as processes that wait for too long, is not the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dmltrain.kvstore.scheduler.lost_links import LostLinks, Node
from dmltrain.kvstore.transport.message import (
    Abort,
    Barrier,
    Bye,
    Heartbeat,
    LinkLost,
    Message,
    Overdue,
    Refuse,
    Register,
    Release,
    ServerAddress,
    Shutdown,
    Start,
    WorkerAddress,
)

ALL: Node = ("all", 0)


@dataclass(frozen=True)
class Send:
    """`message` to one process, or to all connected processes (ALL)."""

    to: Node
    message: Message


@dataclass(frozen=True)
class Finish:
    """The scheduler's work is done; `reason` says why the job was lost, or is empty."""

    reason: str = ""


@dataclass(frozen=True)
class Log:
    text: str


Action = Send | Refuse | Finish | Log


@dataclass
class _Peer:
    registration: Register
    heard: float  # s
    done: bool = False  # its worker has finished
    left: bool = False  # and nothing is left of it that could be lost


@dataclass
class SchedulerCore:
    """State of one job's scheduler. Times are seconds of any monotonic clock."""

    num_workers: int
    num_servers: int
    lost_seconds: float = 8.5  # tolerates a network outage of 5 s and TCP's retransmission pause after it
    start_seconds: float = 120.0
    wait_seconds: float = 600.0
    facts: dict[str, Any] = field(default_factory=dict)  # sent to all processes in `start`
    place: str = "the scheduler"  # with host and address, for messages
    now: float = 0.0
    _peers: dict[Node, _Peer] = field(default_factory=dict)
    _barriers: dict[str, tuple[float, set[int]]] = field(default_factory=dict)
    _links: LostLinks = field(default_factory=LostLinks)
    _began: float | None = None
    _logged: float = 0.0  # when missing processes were last logged
    _started: bool = False
    _finished: bool = False

    def handle(self, node: Node, message: Message, now: float) -> list[Action]:
        """A message from `node`, whose role and index the handshake has proved."""
        if self._finished:
            return []
        self._advance(now)
        if isinstance(message, Register):
            return self._register(node, message)
        peer = self._peers.get(node)
        if peer is None:
            return [Refuse(f"{_name(node)} has not registered")]
        peer.heard = now
        match message:
            case Heartbeat():
                return [Send(node, Heartbeat())]
            case Barrier():
                return self._barrier(node, message.id)
            case Bye():
                return self._bye(node, message)
            case Abort():
                reason = f"{self._describe(node)}: {message.reason}"
                return self._abort(reason, better=self._links.concern(node))
            case Overdue():
                return self._abort(f"{self._describe(node)}: {message.reason}")
            case LinkLost():
                self._links.add(message, now)
                return []
        return [Refuse(f"{message.op or message.kind.name} is not for the scheduler")]

    def lost(self, node: Node, reason: str, now: float) -> list[Action]:
        """The connection to `node` has ended."""
        peer = self._peers.get(node)
        if self._finished or peer is None or peer.left:
            return []
        self._advance(now)
        return self._abort(f"{self._describe(node)} was lost: {reason}", self._links.concern(node, self._host))

    def tick(self, now: float) -> list[Action]:
        """Check the time limits; call it a few times a second."""
        self._advance(now)
        if self._began is None:
            self._began = self._logged = now
        if self._finished:
            return []
        for node, peer in self._peers.items():
            if not peer.left and now - peer.heard > self.lost_seconds:
                return self._abort(
                    f"{self._describe(node)} missed heartbeats for {now - peer.heard:.0f} s "
                    f"(frozen, stopped, or cut off: its address is {peer.registration.host}, and it reports to "
                    f"{self.place})",
                    self._links.concern(node, self._host),
                )
        if now >= self._links.due:
            return self._abort(str(self._links.cause))
        return self._tick_start(now) if not self._started else self._tick_barriers(now)

    def _advance(self, now: float) -> None:
        suspended, self.now = now - self.now > self.lost_seconds / 2, now
        if suspended:  # this process itself: it may still have to read heartbeats
            for peer in self._peers.values():
                peer.heard = now

    def _tick_start(self, now: float) -> list[Action]:
        assert self._began is not None
        missing = ", ".join(_name(node) for node in self._expected() if node not in self._peers)
        if now - self._began > self.start_seconds:
            return self._abort(
                f"not registered after {now - self._began:.0f} s: {missing}; look at their logs, "
                "or raise DMLTRAIN_START_TIMEOUT"
            )
        if now - self._logged >= 10.0:
            self._logged = now
            return [Log(f"waiting for {missing}")]
        return []

    def _tick_barriers(self, now: float) -> list[Action]:
        for name, (since, arrived) in self._barriers.items():
            if now - since > self.wait_seconds:
                missing = ", ".join(f"worker {w}" for w in range(self.num_workers) if w not in arrived)
                return self._abort(
                    f"barrier {name!r}: {missing} did not reach it within {now - since:.0f} s (DMLTRAIN_WAIT_TIMEOUT)"
                )
        return []

    def _register(self, node: Node, message: Register) -> list[Action]:
        if node not in self._expected():
            return [
                Refuse(
                    f"{_name(node)} is not part of this job of {self.num_workers} workers "
                    f"and {self.num_servers} servers"
                )
            ]
        if node in self._peers:
            host_name = self._peers[node].registration.host_name
            return [Refuse(f"{_name(node)} is already registered, from host {host_name}")]
        self._peers[node] = _Peer(message, self.now)
        if any(other not in self._peers for other in self._expected()):
            return []
        self._started = True
        return [
            Send(ALL, self._start()),
            Log(f"all registered: {self.num_workers} workers, {self.num_servers} servers"),
        ]

    def _start(self) -> Start:
        servers = [self._peers["server", number].registration for number in range(self.num_servers)]
        workers = [self._peers["worker", number].registration for number in range(self.num_workers)]
        return Start(
            tuple(
                ServerAddress(each.host, each.port, each.socket_name, each.host_id, each.host_name) for each in servers
            ),
            tuple(WorkerAddress(each.socket_name, each.host_id, each.host_name) for each in workers),
            dict(self.facts),
        )

    def _barrier(self, node: Node, name: str) -> list[Action]:
        if node[0] != "worker":
            return [Refuse("only workers take part in barriers")]
        _, arrived = self._barriers.setdefault(name, (self.now, set()))
        arrived.add(node[1])
        gone = [w for w in range(self.num_workers) if w not in arrived and self._done(("worker", w))]
        if gone:
            return self._abort(f"barrier {name!r}: worker {gone[0]} has finished and will not reach it")
        if len(arrived) < self.num_workers:
            return []
        del self._barriers[name]
        return [Send(("worker", w), Release(name)) for w in range(self.num_workers)]

    def _bye(self, node: Node, message: Bye) -> list[Action]:
        self._peers[node].done, self._peers[node].left = True, not message.stays
        for name, (_, arrived) in self._barriers.items():
            if node[0] == "worker" and node[1] not in arrived:
                return self._abort(f"barrier {name!r}: {_name(node)} has finished and will not reach it")
        if not all(self._done(("worker", w)) for w in range(self.num_workers)):
            return [Log(f"{_name(node)} has finished, and still sums for its host")] if message.stays else []
        self._finished = True
        return [Send(ALL, Shutdown()), Finish()]

    def _abort(self, reason: str, better: bool = False) -> list[Action]:
        """End the job. `better`: this is a better cause than the lost links, if there are any."""
        self._finished = True
        if self._links and not better:
            reason = str(self._links.cause)
        return [Send(ALL, Abort(reason)), Finish(reason)]

    def _done(self, node: Node) -> bool:
        return node in self._peers and self._peers[node].done

    def _expected(self) -> list[Node]:
        return [("server", s) for s in range(self.num_servers)] + [("worker", w) for w in range(self.num_workers)]

    def _host(self, node: Node) -> Node | str:
        """What is equal for processes of one host."""
        peer = self._peers.get(node)
        return peer.registration.host_id or node if peer else node

    def _describe(self, node: Node) -> str:
        return f"{_name(node)} on {self._peers[node].registration.host_name or self._peers[node].registration.host}"


def _name(node: Node) -> str:
    return f"{node[0]} {node[1]}"
