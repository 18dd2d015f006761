"""Which processes take part in an elastic job: its present members and servers, and what became of the others. Pure.

views.py says when that changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dmltrain.kvstore.scheduler.actions import Action, Send
from dmltrain.kvstore.scheduler.lost_links import Members, Node, cut_off, process
from dmltrain.kvstore.scheduler.membership.departures import Decision, Departures
from dmltrain.kvstore.scheduler.membership.newcomers import Newcomers
from dmltrain.kvstore.scheduler.membership.replay import ALL_NEEDED, Replay
from dmltrain.kvstore.scheduler.membership.server_losses import ServerLosses
from dmltrain.kvstore.transport.message.job import LinkLost
from dmltrain.kvstore.transport.message.views import Enter, HasState
from dmltrain.kvstore.view import Lost, View


@dataclass
class Roster:
    """`workers` and `servers`: how many the job has at its start. Members are identified by rank."""

    workers: int
    servers: int
    server_losses: ServerLosses
    departures: Departures
    newcomers: Newcomers = field(default_factory=Newcomers)
    replay: Replay = field(default_factory=Replay)
    view: View | None = None  # until all are ready
    entered: Enter | None = None  # the message with which its members were told of it
    present: set[int] = field(init=False)  # the members that are neither lost nor at their end
    finished: dict[int, int] = field(default_factory=dict)  # member that has left at its end -> the last op it held
    dismissed: set[int] = field(default_factory=set)  # members that a replay has let go
    failed: dict[int, int] = field(default_factory=dict)  # member that ends by an error of its own -> in which op
    removed: set[int] = field(default_factory=set)  # members that were lost, and have no replacement
    lost: list[Lost] = field(default_factory=list)  # since the view began
    _lacking: set[int] = field(default_factory=set)  # members that may not have the state of training yet

    def __post_init__(self) -> None:
        self.present = set(range(self.workers))

    @property
    def count(self) -> int:
        """How many workers there are, with those that have finished."""
        return len(self.present) + len(self.finished)

    @property
    def leader(self) -> int | None:
        """The present member that asks for changes; None before the first view, and if none is present."""
        return next((member for member in self.view.by_duty if member in self.present), None) if self.view else None

    @property
    def passes(self) -> bool:
        """Whether this view has a few ops only, after which the next view follows: members hand over residuals, or
        complete their steps."""
        return bool(self.view and self.view.is_passing) and not self.replay.active

    def is_in(self, view: int, member: int) -> bool:
        """Whether this view is the present one, and the member is present."""
        return self.view is not None and view == self.view.number and member in self.present

    def survives(self, node: Node) -> bool:
        """Whether the job goes on without this process, if enough others are left."""
        present = self.present if node[0] == "worker" else self.server_losses.present
        return self.view is not None and node[1] in present

    def is_removed(self, node: Node) -> bool:
        """Whether the job has gone on without this process, and no replacement has come."""
        if node[0] == "worker":
            return node[1] in self.removed
        servers = self.server_losses
        return self.view is not None and node[1] not in servers.present and node[1] not in servers.coming

    def is_joining(self, node: Node) -> bool:
        """Whether this process has registered to join, and is in no view yet."""
        return node[1] in (self.newcomers.joining if node[0] == "worker" else self.server_losses.coming)

    def has_left(self, node: Node) -> bool:
        """Whether this process has left on purpose, and no replacement has come."""
        return node[0] == "worker" and node[1] in self.departures.gone

    def is_no_member(self, node: Node) -> bool:
        """Whether this process is no member of the present view. Its lost links mean nothing then: they may even be
        those of an earlier process with this role and index."""
        if self.view is None:
            return self.is_removed(node)
        if node[0] != "worker":
            return node[1] in self.lost_servers
        return node[1] not in self.present and (node[1] not in self.dismissed or self.has_left(node))

    def counts(self, lost: LinkLost) -> bool:
        """Whether this lost link counts: both ends are processes of the job, or its own end is about to join."""
        own, ends = process(lost.own), (process(lost.own), process(lost.peer))
        if any(map(self.is_removed, ends)) or self._is_of_another(lost):
            return False
        return self.is_joining(own) or not any(map(self.is_no_member, ends))

    def _is_of_another(self, lost: LinkLost) -> bool:
        """Whether a worker's lost link was to a server that this view has replaced."""
        view, (role, number) = self.view, process(lost.peer)
        return view is not None and role == "server" and number in view.joined_servers and lost.view < view.number

    @property
    def lost_servers(self) -> tuple[int, ...]:
        """The servers that the present view lacks: lost ones, and replacements that join with a later view."""
        return tuple(number for number in range(self.servers) if number not in self.server_losses.present)

    @property
    def over(self) -> bool:
        """Whether no member is present, and at least one has finished: that one held the last op of the job."""
        return not self.present and bool(self.finished)

    @property
    def too_few(self) -> str:
        """Why the job cannot go on with the workers that are left, or empty."""
        return self.departures.too_few(self.count) or (ALL_NEEDED if self.replay.active else "")

    def who_is_cut_off(self, links: Sequence[LinkLost]) -> list[Node]:
        """The processes to remove because of lost links between workers and servers. A member that has finished counts
        as one that has lost no link, because it has left all servers regularly. It holds the state of training, so no
        other member has to."""
        holders = () if self.finished else self.present - self._lacking
        return cut_off(links, Members(self.count, holders, self.newcomers.joining, self.server_losses.present))

    def newcomer_registered(self, member: int) -> None:
        """A replacement of a removed worker, or an additional one, has registered."""
        self.removed.discard(member)
        self.dismissed.discard(member)
        self.departures.gone.discard(member)
        self.newcomers.registered(member)

    def newcomer_lost(self, node: Node) -> None:
        """A process was lost before it was in a view."""
        member = node[1]
        if node[0] == "server":
            del self.server_losses.coming[member]
            return
        self.newcomers.lost(member)
        self.removed.add(member)

    def has_state(self, member: int, message: HasState) -> list[Action]:
        """A member that lacked the state of training now has it."""
        if self.view is not None and message.view == self.view.number:
            self._lacking.discard(member)
        return []

    def member_lost(self, member: int, reason: str) -> None:
        """A member was lost; see `survives`."""
        self.present.discard(member)
        self.removed.add(member)
        self.lost.append(Lost(member, reason, self.failed.pop(member, 0)))
        self.departures.forget(member)
        self.newcomers.member_lost(member)

    def member_finished(self, member: int, done: int) -> None:
        """A present member has finished, and holds op `done`."""
        assert self.view is not None
        self.present.remove(member)
        self.departures.forget(member)
        self.finished[member] = max(done, self.view.base)

    def begin(self, view: View, decision: Decision) -> list[Action]:
        """This view begins. Returns what its members and servers are told, and those that a replay lets go."""
        dismissed = self.present.difference(view.members)
        self.server_losses.begin(view)
        new, departed = self.server_losses.new, tuple(sorted(self.departures.gone | decision.leaves.keys()))
        enter = Enter(view, holds=decision.holds, ends=decision.ends, new_servers=new, departed=departed)
        self._lacking = self._members_without_state(view)
        self.view, self.entered, self.dismissed = view, enter, (self.dismissed | dismissed).difference(view.members)
        self.present = (self.present - dismissed) | set(view.joined)
        self.newcomers.begin(view)
        self.lost.clear()
        nodes = [*(("server", number) for number in view.servers), *(("worker", each) for each in sorted(self.present))]
        told = {member: self.replay.needs(member) for member in sorted(dismissed)}
        lets_go = {member: Enter(view, returns, new_servers=new, departed=departed) for member, returns in told.items()}
        return [
            *(Send(node, enter) for node in nodes),
            *(Send(("worker", member), message) for member, message in lets_go.items()),
        ]

    def resume(
        self, entered: Enter, finished: Mapping[int, int], lost: Mapping[int, str], back: Collection[int]
    ) -> None:
        """Take over from a lost scheduler; see Views.resume."""
        view = entered.view
        self.view, self.entered, self.finished = view, entered, dict(finished)
        self.present = set(view.members).difference(finished, lost)
        self.departures.resume(entered)
        apart = {*self.present, *finished, *entered.departed}
        self.removed = {*range(self.workers), *view.members, *back}.difference(apart)
        self.lost += [Lost(member, reason) for member, reason in sorted(lost.items())]
        self._lacking = {*view.joined, *view.behind}
        self.server_losses.resume(view.servers, entered.new_servers)

    def _members_without_state(self, view: View) -> set[int]:
        """The members of a view that lack the state of training when it begins. They get it in the first op of this
        view, or of a later one if that op is aborted, and report it."""
        had_no_op = self.view is not None and view.base == self.view.base
        before = self._lacking if had_no_op else set()
        return {*before, *view.joined, *view.behind}.intersection(view.members)
