"""The scheduler's decisions: who is here, barriers, who is lost, when the job ends. Pure; process.py moves
bytes.

Theory of operation. Every process connects, registers and sends a heartbeat each second; the scheduler answers each, so
that a frozen scheduler is noticed too. When all have registered, everybody gets the servers' addresses and learns who
shares a host (`start`). A barrier is the set of workers that reached it. A worker says `bye` when it is done; after the
last one, everybody gets `shutdown`. Silence for `lost_seconds`, a connection that ends without `bye`, an `abort` from a
process, or a deadline that passes ends the job for all: `abort` with a reason that names who.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Node = tuple[str, int]  # role, index
EVERYBODY: Node = ("all", 0)


@dataclass(frozen=True)
class Send:
    """`message` to one process, or to EVERYBODY that is connected."""

    to: Node
    message: dict[str, Any]


@dataclass(frozen=True)
class Refuse:
    """Tell the sender of the last message why it cannot take part, and cut its connection."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """The scheduler's work is over; `reason` is empty when the job went well."""

    reason: str = ""


@dataclass(frozen=True)
class Log:
    text: str


@dataclass
class _Peer:
    host_name: str
    address: tuple[str, int]
    meeting: str  # where processes of its host find it,
    host_id: str  # and which host that is
    heard: float  # s
    done: bool = False


@dataclass
class SchedulerCore:
    """State of one job's scheduler. Times are seconds of any monotonic clock."""

    num_workers: int
    num_servers: int
    lost_seconds: float = 8.5  # a cable out for 5 s and TCP's pause after it are no loss
    start_seconds: float = 120.0
    wait_seconds: float = 600.0
    facts: dict[str, Any] = field(default_factory=dict)  # told to everybody at the start
    now: float = 0.0
    _peers: dict[Node, _Peer] = field(default_factory=dict)
    _barriers: dict[str, tuple[float, set[int]]] = field(default_factory=dict)
    _began: float | None = None
    _complained: float = 0.0
    _started: bool = False
    _finished: bool = False

    def handle(self, node: Node, message: dict[str, Any], now: float) -> list[Send | Refuse | Finish | Log]:
        """What `node` said (its role and index are proved by the handshake)."""
        if self._finished:
            return []
        self._advance(now)
        operation = message.get("op")
        if operation == "register":
            return self._register(node, message)
        peer = self._peers.get(node)
        if peer is None:
            return [Refuse(f"{_name(node)} has not registered")]
        peer.heard = now
        if operation == "heartbeat":
            return [Send(node, {"op": "heartbeat"})]
        if operation == "barrier":
            return self._barrier(node, str(message.get("id")))
        if operation == "bye":
            return self._bye(node)
        if operation == "abort":
            return self._abort(f"{self._describe(node)}: {message.get('reason')}")
        return [Refuse(f"unknown operation {operation!r}")]

    def lost(self, node: Node, reason: str, now: float) -> list[Send | Refuse | Finish | Log]:
        """The connection to `node` has ended."""
        peer = self._peers.get(node)
        if self._finished or peer is None or peer.done:
            return []
        self._advance(now)
        return self._abort(f"{self._describe(node)} is gone: {reason}")

    def tick(self, now: float) -> list[Send | Refuse | Finish | Log]:
        """Time passes; call it a few times a second."""
        self._advance(now)
        if self._began is None:
            self._began = self._complained = now
        if self._finished:
            return []
        for node, peer in self._peers.items():
            if not peer.done and now - peer.heard > self.lost_seconds:
                return self._abort(f"{self._describe(node)} gave no sign of life for {now - peer.heard:.0f} s "
                                   "(frozen, stopped, or cut off)")
        return self._tick_start(now) if not self._started else self._tick_barriers(now)

    def _advance(self, now: float) -> None:
        slept, self.now = now - self.now > self.lost_seconds / 2, now
        if slept:  # this very process was stopped or starved: nobody else's silence can be judged
            for peer in self._peers.values():
                peer.heard = now

    def _tick_start(self, now: float) -> list[Send | Refuse | Finish | Log]:
        assert self._began is not None
        missing = ", ".join(_name(node) for node in self._expected() if node not in self._peers)
        if now - self._began > self.start_seconds:
            return self._abort(f"after {now - self._began:.0f} s still not here: {missing}; look at their logs, "
                               "or raise DMLTRAIN_START_TIMEOUT")
        if now - self._complained >= 10.0:
            self._complained = now
            return [Log(f"waiting for {missing}")]
        return []

    def _tick_barriers(self, now: float) -> list[Send | Refuse | Finish | Log]:
        for name, (since, arrived) in self._barriers.items():
            if now - since > self.wait_seconds:
                missing = ", ".join(f"worker {w}" for w in range(self.num_workers) if w not in arrived)
                return self._abort(f"barrier {name!r}: {missing} did not come within {now - since:.0f} s "
                                   "(DMLTRAIN_WAIT_TIMEOUT)")
        return []

    def _register(self, node: Node, message: dict[str, Any]) -> list[Send | Refuse | Finish | Log]:
        if node not in self._expected():
            return [Refuse(f"{_name(node)} is not part of this job of {self.num_workers} workers "
                           f"and {self.num_servers} servers")]
        if node in self._peers:
            return [Refuse(f"{_name(node)} is here already, from host {self._peers[node].host_name}")]
        host, port = str(message.get("host", "")), message.get("port", 0)
        self._peers[node] = _Peer(str(message.get("host_name", "")), (host, port if type(port) is int else 0),
                                  str(message.get("meeting", "")), str(message.get("host_id", "")), self.now)
        if any(other not in self._peers for other in self._expected()):
            return []
        self._started = True
        return [Send(EVERYBODY, {**self.facts, "op": "start", **self._table()}),
                Log(f"all here: {self.num_workers} workers, {self.num_servers} servers")]

    def _table(self) -> dict[str, Any]:
        servers = [self._peers["server", number] for number in range(self.num_servers)]
        workers = [self._peers["worker", number] for number in range(self.num_workers)]
        return {"servers": [[*peer.address, peer.meeting, peer.host_id] for peer in servers],
                "workers": [[peer.host_id, peer.meeting] for peer in workers]}

    def _barrier(self, node: Node, name: str) -> list[Send | Refuse | Finish | Log]:
        if node[0] != "worker":
            return [Refuse("only workers take part in barriers")]
        _, arrived = self._barriers.setdefault(name, (self.now, set()))
        arrived.add(node[1])
        gone = [w for w in range(self.num_workers) if w not in arrived and self._done(("worker", w))]
        if gone:
            return self._abort(f"barrier {name!r}: worker {gone[0]} has finished already and will never come")
        if len(arrived) < self.num_workers:
            return []
        del self._barriers[name]
        return [Send(("worker", w), {"op": "release", "id": name}) for w in range(self.num_workers)]

    def _bye(self, node: Node) -> list[Send | Refuse | Finish | Log]:
        self._peers[node].done = True
        for name, (_, arrived) in self._barriers.items():
            if node[0] == "worker" and node[1] not in arrived:
                return self._abort(f"barrier {name!r}: {_name(node)} has finished already and will never come")
        if not all(self._done(("worker", w)) for w in range(self.num_workers)):
            return []
        self._finished = True
        return [Send(EVERYBODY, {"op": "shutdown"}), Finish()]

    def _abort(self, reason: str) -> list[Send | Refuse | Finish | Log]:
        self._finished = True
        return [Send(EVERYBODY, {"op": "abort", "reason": reason}), Finish(reason)]

    def _done(self, node: Node) -> bool:
        return node in self._peers and self._peers[node].done

    def _expected(self) -> list[Node]:
        return [("server", s) for s in range(self.num_servers)] + [("worker", w) for w in range(self.num_workers)]

    def _describe(self, node: Node) -> str:
        return f"{_name(node)} on {self._peers[node].host_name or self._peers[node].address[0]}"


def _name(node: Node) -> str:
    return f"{node[0]} {node[1]}"
