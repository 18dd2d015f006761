"""What the loss of a process means: an elastic job goes on without it, any other ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.kvstore.scheduler.actions import Action, Cut, Log, Send
from dmltrain.kvstore.scheduler.ending import Ending
from dmltrain.kvstore.scheduler.lost_links import Node, process
from dmltrain.kvstore.scheduler.membership.replay import ALL_NEEDED
from dmltrain.kvstore.scheduler.membership.views import Views
from dmltrain.kvstore.scheduler.peers import Peers
from dmltrain.kvstore.transport.message.job import Abort


@dataclass
class Losses:
    """`peers`, `views`, `ending`: those of the job, which a loss changes."""

    peers: Peers
    views: Views
    ending: Ending

    def lose(self, node: Node, reason: str) -> list[Action]:
        """A process was lost."""
        roster, worker = self.views.roster, node[0] == "worker"
        is_dismissed = worker and node[1] in roster.dismissed
        if is_dismissed and not roster.has_left(node) and roster.replay.needs(node[1]):
            return self.ending.abort(f"{reason}; {ALL_NEEDED}", better=True)
        if is_dismissed or roster.has_left(node):
            self._part(node)
            return []
        if roster.is_joining(node):
            return self.drop_newcomer(node, reason)
        if roster.survives(node):
            return self._remove(node, reason) if worker else self.remove_server(node, reason)
        return self.ending.abort(reason, self.ending.causes.concern(node, self.peers.host))

    def failed(self, node: Node, error: str, op: int) -> list[Action]:
        """A worker ends by an error of its own, in this op; the end of its link follows."""
        roster = self.views.roster
        if roster.survives(node):
            roster.failed[node[1]] = op
        elif not roster.is_joining(node):
            return []
        return self.lose(node, f"{self.peers.describe(node)} failed: {error}")

    def remove_server(self, node: Node, reason: str, is_here: bool = True) -> list[Action]:
        """Go on without this server. `is_here`: whether the connection of this role and index is the lost server's; it
        may be that of its replacement."""
        changed = self.views.server_lost(node[1], reason)
        waits = "no server is left, and the job waits for a replacement"
        goes_on = waits if self.views.roster.server_losses.waits else "the job goes on without it"
        stuck = self.views.stuck
        parted = self.disconnect(node, reason if stuck else f"{reason}; {goes_on}", f"removed from the job: {reason}")
        actions = parted if is_here else parted[:1]
        return [*actions, *(self.ending.abort(f"{reason}; {stuck}", True) if stuck else changed)]

    def drop_newcomer(self, node: Node, reason: str) -> list[Action]:
        """Go on without a process that registered to join and is in no view yet."""
        roster = self.views.roster
        if node[0] == "worker" and roster.replay.needs(node[1]):
            return self.ending.abort(f"{reason}; {ALL_NEEDED}", better=True)
        roster.newcomer_lost(node)
        parted = self.disconnect(node, f"{reason}, before it had joined", f"did not join the job: {reason}")
        return self.unless_stuck(parted)

    def disconnect(self, node: Node, log: str, reason: str) -> list[Action]:
        """End the connection to a process that the job goes on without."""
        self._part(node)
        return [Log(log), Send(node, Abort(reason)), Cut(node)]

    def unless_stuck(self, actions: list[Action]) -> list[Action]:
        """`actions`, or the end of the job if it cannot go on without the servers that were lost."""
        return self.ending.abort(f"a server was lost: {stuck}") if (stuck := self.views.stuck) else actions

    def end_all(self) -> list[Action]:
        """No worker is left: the job has ended, as planned or with too few workers."""
        ends = self.views.roster.departures.ends
        return self.ending.abort(ends, better=True) if ends else self.ending.end()

    def judge_links(self) -> list[Action]:
        """No better cause than the lost links was found in time."""
        roster, ending, actions = self.views.roster, self.ending, list[Action]()
        if not roster.view:
            return ending.abort(str(ending.links.cause))
        links = ending.causes.all
        for node in roster.who_is_cut_off(links):
            if not ending.finished and (roster.is_joining(node) or not roster.is_no_member(node)):
                cause = next(str(link) for link in links if node in (process(link.own), process(link.peer)))
                actions += self.lose(node, cause)
        return actions

    def _remove(self, node: Node, reason: str) -> list[Action]:
        """Go on without this worker."""
        roster = self.views.roster
        changed = self.views.member_lost(node[1], reason)
        goes_on = "" if roster.over or roster.too_few else "; the job goes on without it"
        actions = self.disconnect(node, f"{reason}{goes_on}", f"removed from the job: {reason}")
        if roster.over:
            return [*actions, *self.end_all()]
        if roster.too_few:
            return [*actions, *self.ending.abort(f"{reason}; {roster.too_few}", better=True)]
        return actions + changed

    def _part(self, node: Node) -> None:
        """The end of the connection to this process is no loss from now on."""
        self.peers[node].left = True
        self.ending.links.forget(node)
