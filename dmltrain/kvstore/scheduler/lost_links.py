"""Lost links between processes, until the scheduler names one as the cause of the job's end, or removes a process of
an elastic job because of them. Pure.

A link is lost because the network was cut, or because one of its processes has ended, failed or frozen. The second
cause is better, and the scheduler hears of it at about the same time. So a lost link waits for WAIT_SECONDS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from dmltrain.kvstore.transport.message.job import LinkEnd, LinkLost

WAIT_SECONDS = 2.0  # two heartbeats
Node = tuple[str, int]  # role, index


@dataclass
class LostLinks:
    """The lost links that wait. Each is reported by one or both of its ends, and counts once."""

    due: float = math.inf  # s, when to name one of them as the cause
    _by_ends: dict[frozenset[tuple[str, int]], LinkLost] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._by_ends)

    @property
    def cause(self) -> LinkLost:
        """The first link that one of its ends has found to be cut; if there is none, the first link."""
        links = list(self._by_ends.values())
        return next((link for link in links if link.cut), links[0])

    def add(self, lost: LinkLost, now: float) -> None:
        ends = frozenset((end.role, end.index) for end in (lost.own, lost.peer))
        known = self._by_ends.get(ends)
        if known is None or (lost.cut and not known.cut):  # the other end may only have seen that this one closed it
            self._by_ends[ends] = lost
        self.due = min(self.due, now + WAIT_SECONDS)

    def forget(self, node: Node) -> None:
        """This process was removed. Its lost links are a consequence, so they do not count."""
        self.keep(lambda lost: node not in (process(lost.own), process(lost.peer)))

    def keep(self, counts: Callable[[LinkLost], bool]) -> None:
        """Forget the links for which `counts` is false."""
        self._by_ends = {ends: lost for ends, lost in self._by_ends.items() if counts(lost)}
        if not self._by_ends:
            self.due = math.inf

    @property
    def all(self) -> list[LinkLost]:
        return list(self._by_ends.values())

    def concern(self, node: Node, group: Callable[[Node], Any] = lambda node: node) -> bool:
        """Whether one end of the cause is in this process, or in a process with the same `group` (its host)."""
        return bool(self) and group(node) in [group(process(end)) for end in (self.cause.own, self.cause.peer)]


@dataclass(frozen=True)
class Members:
    """The processes that take part. `count`: how many workers there are, with those that have finished. `holders`: the
    workers that certainly have the state of training; empty when a worker has finished, because then the state is safe.
    `joining`: the workers that are not members yet. `servers`: those of the present view that are not lost."""

    count: int
    holders: Collection[int]
    joining: Collection[int]
    servers: Collection[int]


def cut_off(links: Iterable[LinkLost], members: Members) -> list[Node]:
    """The processes to remove because of lost links between workers and servers. The first of these rules that applies:

    1. a server that has lost its links to more than half of the members;
    2. if every holder of the state has lost a server, the servers that one of the holders has lost, as few as possible,
       if another server is left: so one holder stays connected to all servers that are left;
    3. each worker with a lost link.

    The caller judges the links that are left again after the removal."""
    pairs = {(process(link.own), process(link.peer)) for link in links}
    cut = {(a[1], b[1]) if a[0] == "worker" else (b[1], a[1]) for a, b in pairs}
    for server in sorted({server for _, server in cut}):
        lost = {worker for worker, other in cut if other == server}.difference(members.joining)
        if 2 * len(lost) > members.count:
            return [("server", server)]
    servers = _cut_from_state(cut, members)
    return [("server", server) for server in servers] or [
        ("worker", worker) for worker in sorted({worker for worker, _ in cut})
    ]


def _cut_from_state(cut: set[tuple[int, int]], members: Members) -> list[int]:
    """The servers to remove for rule 2 of `cut_off`: those of the holder that has lost the fewest. Among several such
    holders it is the one whose removed servers reconnect the most other holders. Empty if a holder has lost no server,
    or if no server would be left."""
    lost = [{server for worker, server in cut if worker == holder} for holder in sorted(members.holders)]
    fewest = min(lost, key=lambda servers: (len(servers), -sum(other <= servers for other in lost)), default=set())
    return sorted(fewest) if set(members.servers) - fewest else []


def process(end: LinkEnd) -> Node:
    """The process at this end of a link. A relay runs in its worker's process."""
    return ("worker" if end.role == "relay" else end.role), end.index
