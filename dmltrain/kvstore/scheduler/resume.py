"""How another incarnation of the scheduler learns how far an elastic job is. Pure.

The processes of the job come back to the new scheduler, and each says which view it was told last. The view with the
highest number counts: all its members held its base when the lost scheduler sent it, so all of them can enter it. The
new scheduler waits for all members of this view and all servers. A process that does not come within `lost_seconds` of
the first one is lost. It does not wait for processes that the launcher knows to be lost (`lost_before`), such as all on
the host of the lost scheduler. Workers that have finished do not come back; the servers say which these are. Then a
change of view begins (`Views.resume`). It completes or aborts what the members were doing, and what the lost scheduler
had begun.

Other messages wait until then. The scheduler does not wait for a worker that is certainly gone: when its replacement
registers, or when every server has lost its link to it. A worker that joined with the highest view, but was not told
so, registers again: it leaves that view and joins once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dmltrain.kvstore.scheduler.lost_links import Node, process
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.job import LinkLost, Register, Start
from dmltrain.kvstore.transport.message.views import Enter, Left, Ready, Rejoin
from dmltrain.kvstore.view import View


@dataclass
class Resume:
    """`back`: the processes that have come back. `held`: the messages that wait, in order."""

    workers: int
    servers: int
    lost_seconds: float
    lost_before: frozenset[Node] = frozenset()  # processes of which the launcher knows that they are lost
    back: dict[Node, Rejoin] = field(default_factory=dict)
    held: list[tuple[Node, Message]] = field(default_factory=list)
    due: float = math.inf  # when those that are missing are lost
    gone: dict[Node, str] = field(default_factory=dict)  # processes that had come back and were lost again -> why
    left: list[Left] = field(default_factory=list)  # reports of servers, after they had come back

    def take(self, node: Node, message: Message, now: float) -> None:
        """A message of another kind than a heartbeat."""
        if isinstance(message, Rejoin):
            self.back[node] = message
            self.gone.pop(node, None)
            self.due = min(self.due, now + self.lost_seconds)
        elif isinstance(message, Left):
            self.left.append(message)
        else:
            self.held.append((node, message))

    def lose(self, node: Node, reason: str) -> None:
        """The connection to a process has ended. Its reports about views still count."""
        self.held = [item for item in self.held if item[0] != node]
        if node in self.back:
            self.gone[node] = reason

    @property
    def entered(self) -> Enter | None:
        """The message about the highest view that any process knows."""
        entered = [enter for rejoin in self.back.values() for enter in rejoin.entered]
        return max(entered, key=lambda enter: enter.view.number, default=None)

    @property
    def view(self) -> View | None:
        """The highest view that any process knows."""
        return self.entered.view if self.entered else None

    @property
    def ready(self) -> list[Ready]:
        """What the workers that have come back have said when they were ready."""
        return [rejoin.ready[0] for rejoin in self.back.values() if rejoin.ready]

    @property
    def obstacle(self) -> str:
        """Why the job cannot go on after its scheduler was lost; empty if it can."""
        views = [enter.view for rejoin in self.back.values() for enter in rejoin.entered]
        if self.view is None:
            return "the scheduler was lost before all workers were ready for the first step: start the job again"
        if any(view.number == self.view.number and view != self.view for view in views):
            return (
                f"two schedulers have made view {self.view.number} in different ways: start the job again from its "
                "last checkpoint"
            )
        replayed = any(message.replay for message in self.ready)
        return "a replay cannot go on when its scheduler is lost: start it again" if replayed else ""

    @property
    def finished(self) -> dict[int, int]:
        """The workers that have finished -> the last op that each held."""
        reports = [*self.left]
        for message in self.back.values():
            view = message.entered[0].view.number if message.entered else 0
            reports += [Left(view, worker.member, worker.done) for worker in message.finished]
        return {report.member: report.done for report in reports if self._is_true(report)}

    def _is_true(self, report: Left) -> bool:
        """Whether a server's report is about a worker that the job has now. A server that does not know the highest
        view may report a worker that this view has replaced or removed."""
        view = self.view
        if view is None or report.view >= view.number:
            return True
        return report.member not in {*view.joined, *(lost.member for lost in (*view.lost, *view.left))}

    @property
    def expected(self) -> list[Node]:
        """The processes that must come back, as far as is known."""
        members = self.view.members if self.view else range(self.workers)
        servers = self.view.servers if self.view else range(self.servers)
        nodes: list[Node] = [("server", number) for number in servers]
        return nodes + [("worker", member) for member in members if member not in self.finished]

    @property
    def replaced(self) -> set[Node]:
        """The processes whose replacements have registered."""
        return {node for node, message in self.held if isinstance(message, Register)}

    @property
    def severed(self) -> set[Node]:
        """The workers to which every server has lost its link."""
        links = {
            frozenset((process(message.own), process(message.peer)))
            for _, message in self.held
            if isinstance(message, LinkLost)
        }
        servers = [node for node in self.back if node[0] == "server" and node not in self.gone]
        workers = [node for node in self.expected if node[0] == "worker"]
        return {node for node in workers if servers and all(frozenset((node, server)) in links for server in servers)}

    @property
    def missing(self) -> list[Node]:
        """The processes that must come back and are not connected."""
        return [node for node in self.expected if node not in self.back or node in self.gone]

    def absence(self, node: Node) -> str:
        """Why one of the missing counts as lost."""
        if node in self.gone:
            return f"was lost: {self.gone[node]}"
        if node in self.replaced and self.view and node[0] == "worker" and node[1] in self.view.joined:
            return "was not told that it had joined, or was lost: it joins again"
        if node in self.replaced:
            return "was lost: its replacement is here"
        if node in self.lost_before:
            return "was lost before this scheduler began"
        if node in self.severed:
            return "was lost: no server has a connection to it"
        return f"has not come back to the next scheduler within {self.lost_seconds:g} s"

    @property
    def complete(self) -> bool:
        """Whether the scheduler waits for no further process."""
        nobody = self.gone.keys() | self.lost_before | self.replaced | self.severed
        return bool(self.back) and not set(self.missing) - nobody

    @property
    def start(self) -> Start:
        """The message that the job began with."""
        return next(rejoin.start for rejoin in self.back.values())

    def registration(self, node: Node) -> Register:
        """Where a process is; of one that has not come back, where it, or the one before it, was at the start."""
        if node in self.back:
            return self.back[node].registration
        role, index = node
        addresses = self.start.servers if role == "server" else self.start.workers
        if index >= len(addresses):
            return Register("", 0, "", "", "")
        return Register("", 0, addresses[index].host_name, addresses[index].socket_name, addresses[index].host_id)
