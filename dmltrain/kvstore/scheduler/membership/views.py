"""The views of an elastic job: which members and servers it has from which op on. Pure; core.py notices losses.

Theory of operation. The terms are those of virtual synchrony (Birman and Joseph 1987, "Exploiting virtual synchrony in
distributed systems"). A member holds op n when its training thread has recognised that it has all results of op n. An
op needs all members, so the last ops that two members hold differ by at most one. An op is committed if a present
member, or one that has finished, holds it. When a worker is lost:

1. The scheduler sends `flush` without permission to all present members. From then on a member recognises no further
   op. It answers with the last op that it holds.
2. The target is the highest answer. A member that is behind gets `flush` with the target as permission: it can complete
   this op, because the servers still have the results. It answers when it holds the target.
3. When all members hold the target (flushing.py), the next view begins after it. No member that is left has recognised
   a later op. So if a later op was begun, the members abort it, and do it again in the next view without the lost ones.

The loss of a server begins the same change of view. But the results that this server had are lost, so members that are
behind cannot complete a round (server_losses.py). A replacement of the server joins with the next view. If no other
change is under way, the leader asks for one, as for workers that join.

If another process is lost during a change, a new turn begins. Each flush replaces the permission of earlier turns. So
if a member that held a later op is lost between two turns, that op is aborted. At the planned end of a view
(`View.until`, in a replay or if `View.is_passing`) the same reports are sent, but members send them unasked.

A replacement of a lost worker has the rank of the lost one; an additional worker has a new rank. Both join with a
change of view (newcomers.py), which is possible only between two rounds of training. Only the members know when that
is. So the scheduler tells the leader that newcomers wait. When the leader's next op is a round, it asks for the change
and waits for it. That round needs the leader, so no member can hold it: the next op of all members is this same round.
(If workers make steps of their own, which are no ops, the leader asks between two of its steps.) Two other changes come
in the same way, so that they interrupt no round: a new division of samples (balance.py), and another kvstore
(kind_change.py). In a replay (replay.py) the recorded views say which workers join, and when; the job waits for those
that are not ready.

Members leave on purpose at the same moments, and only at such a moment may a job with too few members wait or end
(departures.py). If they have residuals to hand over, this is the only op of an additional view (`View.hands_over`),
whose end is planned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dmltrain.kvstore.scheduler.actions import Action, Log, Send
from dmltrain.kvstore.scheduler.membership.balance import Balance
from dmltrain.kvstore.scheduler.membership.departures import Decision, Departures
from dmltrain.kvstore.scheduler.membership.flushing import NOTHING, Flushing
from dmltrain.kvstore.scheduler.membership.kind_change import KindChange
from dmltrain.kvstore.scheduler.membership.replay import FIXED, Replay
from dmltrain.kvstore.scheduler.membership.roster import Roster
from dmltrain.kvstore.scheduler.membership.server_losses import ALL_SERVERS_NEEDED, NO_SERVER, ServerLosses
from dmltrain.kvstore.scheduler.peers import Barriers
from dmltrain.kvstore.scheduler.reports import Viewed
from dmltrain.kvstore.transport.message.changes import Change
from dmltrain.kvstore.transport.message.job import Barrier, Release, ServerAddress
from dmltrain.kvstore.transport.message.views import Admit, Enter, Flush, Flushed, Invite, Leaving, Ready, Speed
from dmltrain.kvstore.view import EQUAL, Lost, View, barrier_of


@dataclass
class Views:
    """The changes of the `roster`. `workers` and `servers`: how many the job has at its start. `minimum`: with fewer
    workers the job ends, after it has waited `patience` seconds for more. `now`: seconds of the core's clock, set by
    the core. `restarts`: how many replacements of servers there can be."""

    workers: int
    servers: int
    minimum: int
    patience: float = 0.0
    now: float = 0.0
    restarts: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)  # that are the same for all workers
    roster: Roster = field(init=False)
    flushing: Flushing = field(init=False)
    _kvstore: tuple[str, float] = ("", 0.0)  # its type and staleness at the start; see View
    _ready: set[int] = field(default_factory=set)
    _barriers: Barriers = field(init=False)  # of this view
    _balance: Balance = field(default_factory=lambda: Balance(EQUAL))
    _kind: KindChange = field(default_factory=KindChange)
    _resumed: bool = False  # until the next view: the scheduler before may not have released all barriers

    def __post_init__(self) -> None:
        servers = ServerLosses(set(range(self.servers)), self.restarts)
        self.roster = Roster(self.workers, self.servers, servers, Departures(self.minimum, self.patience))
        self.flushing, self._barriers = Flushing(self.roster), Barriers(())

    def server_registered(self, number: int, address: ServerAddress) -> list[Action]:
        """A replacement of a lost server has registered. Call `stuck` after it."""
        self.roster.server_losses.registered(number, address)
        return self._proceed() if self.flushing.active else self._invite()

    def ready(self, member: int, message: Ready, hosts: Sequence[tuple[int, ...]]) -> list[Action]:
        """A worker is ready. `hosts`: the ranks on each host. The first view begins when all workers of the start are
        ready. A later worker waits until it is admitted."""
        roster = self.roster
        if roster.view is not None:
            if not roster.newcomers.ready(member, next(host for host in hosts if member in host)):
                return []
            return self._end_as_planned() if roster.replay.active and not self.flushing.active else self._invite()
        self._ready.add(member)
        if member == 0:
            self.facts = message.facts
            roster.replay = Replay(message.replay, tuple(range(self.servers)))
            self._balance = Balance(message.balance)
            self._kvstore = message.kvstore, message.staleness
            self._kind.why_fixed = FIXED if roster.replay.active else message.why_fixed
        if len(self._ready) < self.workers:
            return []
        if roster.replay.active:
            return self._begin_view(roster.replay.next())
        kvstore, staleness = self._kvstore
        servers = tuple(range(self.servers))
        return self._begin_view(View(1, 0, tuple(hosts), servers, kvstore=kvstore, staleness=staleness))

    def resume(
        self, entered: Enter, finished: Mapping[int, int], lost: Mapping[int, str], ready: Ready, back: Collection[int]
    ) -> list[Action]:
        """Take over from a lost scheduler, in the view of `entered`, which all members that are left know. `lost`:
        members of this view that have not come back, and why. `back`: all workers that have come back, also those that
        were removed before. Look at `over` and `too_few` after it. An answer to a flush of the lost scheduler is valid
        here as well: the member that sent it is still frozen."""
        self.facts = ready.facts
        self._balance, self._kind.why_fixed = Balance(ready.balance), ready.why_fixed
        self.roster.resume(entered, finished, lost, back)
        self._resumed = True
        return self._begin_turn() if self.roster.present else []

    # -- what waits for the leader --------------------------------------------------------------------------------

    def admit(self, member: int, message: Admit) -> list[Action]:
        """The leader waits before a round of training."""
        if not self._is_now(message.view, member):
            return []
        self.roster.newcomers.admit(member)
        return self._begin_turn()

    def _invite(self) -> list[Action]:
        """Tell the leader that a change of view waits, if there is one, and if the leader has to ask for it."""
        roster, departures = self.roster, self.roster.departures
        if roster.replay.active or self.flushing.active or roster.leader is None or departures.ends or roster.passes:
            return []
        waiting = roster.newcomers.waiting
        if departures.holding:
            enough = departures.enough(len(roster.present) + len(waiting))
            return self._begin_turn() if enough or departures.notices else []
        wants = self._balance.proposal or departures.wanted or self._kind.request.change
        if not (waiting or roster.server_losses.coming or wants):
            return []
        return [Send(("worker", roster.leader), Invite(tuple(sorted(waiting))))]

    def speed(self, member: int, message: Speed, now: float) -> list[Action]:
        """A member has measured its speed. If samples should be divided anew, the leader asks for the change."""
        if self.roster.replay.active or not self._is_now(message.view, member):
            return []
        assert self.roster.view is not None
        return self._invite() if self._balance.report(self.roster.view, member, message.samples, now) else []

    def change(self, change: Change) -> list[Action]:
        """The user wants to change the job's kvstore."""
        actions = self._kind.ask(change, self.roster.view, bool(self.roster.finished or self.roster.departures.ends))
        return [*actions, *self._invite()]

    def notice(self, member: int, message: Leaving) -> list[Action] | None:
        """A member gives notice that it leaves on purpose. None if the notice does not count."""
        roster = self.roster
        if roster.view is None or roster.replay.active:
            return None
        if member not in roster.present or member in roster.departures.notices:
            return None
        roster.departures.notice(member, message.reason, message.residuals)
        return self._invite()

    def tick(self) -> list[Action]:
        """Begin a change of view if the job has waited for more workers for long enough."""
        return self._begin_turn() if not self.flushing.active and self.roster.departures.overdue(self.now) else []

    # -- losses and ends ------------------------------------------------------------------------------------------

    def member_lost(self, member: int, reason: str) -> list[Action]:
        """A member was lost; see `survives`. Call `too_few` after it."""
        self.roster.member_lost(member, reason)
        return self._begin_turn() if self.roster.present else []

    def server_lost(self, number: int, reason: str) -> list[Action]:
        """A server was lost; see `survives`. Call `stuck` after it."""
        self.roster.server_losses.lost(number, reason)
        return self._begin_turn() if self.roster.present else []

    @property
    def stuck(self) -> str:
        """Why the job cannot go on without the servers that were lost, or empty."""
        roster, servers, target = self.roster, self.roster.server_losses, self.flushing.target
        if roster.replay.active and len(servers.present) < self.servers:
            return ALL_SERVERS_NEEDED
        if servers.none and not servers.waits:
            return NO_SERVER
        if roster.view is None or not self.flushing.active or not self.flushing.complete:
            return ""
        if servers.can_complete(target) or not roster.present or self.flushing.behind != roster.present:
            return ""
        return (
            f"only workers that have finished have its results of op {target}: start the job again from its last "
            "checkpoint"
        )

    def member_finished(self, member: int, done: int) -> list[Action]:
        """A member has finished."""
        if self.roster.view is None or member not in self.roster.present:
            return []
        self.roster.member_finished(member, done)
        actions: list[Action] = [*self._kind.cancel()]
        return [*actions, *self._proceed()] if self.flushing.active and self.roster.present else actions

    def flushed(self, member: int, message: Flushed) -> list[Action]:
        """A member reports which op it holds."""
        if not self.roster.is_in(message.view, member) or not self.flushing.expects(message.turn):
            return []
        self.flushing.reports[member] = message.done
        # This matters only if another member holds that op (ServerLosses.can_complete): then all had reached the
        # barrier.
        if message.met:
            self.roster.server_losses.released(barrier_of(message.done + 1))
        return self._proceed() if self.flushing.active or self.roster.passes else self._end_as_planned()

    def barrier(self, member: int, message: Barrier) -> list[Action]:
        """A member has reached a barrier. If a change of view interrupts a barrier, the members of the next view wait
        for it again."""
        if not self._is_now(message.view, member):
            return []
        if self._barriers.reach(message.id, member, self.now).missing:
            return []
        self.roster.server_losses.released(message.id)
        return self._send(Release(message.id, message.view))

    @property
    def why_hanging(self) -> str:
        """Why a barrier of this view can never be complete; empty if all can be."""
        return self._barriers.why_hanging(self.roster.finished)

    # -- the change -----------------------------------------------------------------------------------------------

    def _is_now(self, view: int, member: int) -> bool:
        """Whether a member's message about this view still counts: the view is the present one, no change of it has
        begun, and the member is present."""
        return not self.flushing.active and self.roster.is_in(view, member)

    def _begin_turn(self) -> list[Action]:
        """Begin a turn of a change of view: ask all present members which op they hold."""
        assert self.roster.view is not None
        self.flushing.begin_turn()
        return self._send(Flush(self.roster.view.number, self.flushing.turn, NOTHING))

    def _proceed(self) -> list[Action]:
        """Continue the change of view, if all present members have answered."""
        roster, departures, servers = self.roster, self.roster.departures, self.roster.server_losses
        assert roster.view is not None
        if not self.flushing.complete:
            return []
        target, late = self.flushing.target, self.flushing.behind
        if late and servers.can_complete(target):
            return self._permit(late, target)
        if self.stuck or servers.none:
            return []
        if target > roster.view.base:
            departures.residuals.difference_update(roster.view.hands_over)
        decision = self._decide(late)
        gone = (set(roster.view.members) - roster.present) | decision.leaves.keys()
        left = tuple(Lost(member, reason) for member, reason in sorted(decision.leaves.items()))
        view = roster.view.without(gone, target, tuple(roster.lost), left)
        if decision.admits:
            view = view.joined_by(roster.newcomers.admitted)
        if decision.hands_over:
            view = replace(view, until=target + 1, hands_over=decision.hands_over)
        view = servers.next_view(view, late)
        between = roster.newcomers.between_rounds and decision.trains and not late
        view = self._kind.next_view(roster.view, view, between, drained=not self.flushing.active)
        return self._begin_view(self._balance.next_view(roster.view, view), decision)

    def _decide(self, late: set[int]) -> Decision:
        """What comes with the next view. Members may leave, join or wait only if all are between two rounds: because
        they wait there already, or the leader waits there, or they have handed over residuals. They are not between two
        rounds if some are `late`: these still lack the outcome of a round that others hold."""
        assert self.roster.view is not None
        departures, newcomers = self.roster.departures, self.roster.newcomers
        if departures.ends:
            return Decision(ends=departures.ends)
        if departures.holding:
            newcomers.admit_but(self.roster.view.members)
        elif late or not (newcomers.between_rounds or self.roster.view.hands_over):
            return Decision()
        return departures.decide(self.roster.present, len(newcomers.admitted), self.now)

    def _permit(self, late: set[int], target: int) -> list[Action]:
        """Permit the members that are behind to recognise the target. They answer in the same turn."""
        assert self.roster.view is not None
        permit: list[Release | Flush] = [Flush(self.roster.view.number, self.flushing.turn, target)]
        # The lost scheduler may have sent this release to some members only. The member that holds the target has
        # passed its last barrier, so all members had reached it.
        if self._resumed:
            permit.insert(0, Release(barrier_of(target), self.roster.view.number))
        return [Send(("worker", member), message) for member in self.flushing.permit(late) for message in permit]

    def _end_as_planned(self) -> list[Action]:
        roster, replay = self.roster, self.roster.replay
        if not self.flushing.complete or replay.ended:
            return []
        if missing := replay.missing(roster.newcomers.waiting.keys() | roster.dismissed):
            names = ", ".join(f"worker {member}" for member in missing)
            return [Log(f"the replay waits for {names} to join, as in the replayed job")]
        return self._begin_view(replay.next())

    def _begin_view(self, view: View, decision: Decision = Decision()) -> list[Action]:  # noqa: B008  it is frozen
        told = self.roster.begin(view, decision)
        self.flushing.end()
        self._resumed = False
        self._barriers = Barriers(view.members)
        names = ", ".join(str(member) for member in view.members)
        logs = [Log(f"view {view.number} after op {view.base}: workers {names}", Viewed(view.number, view.members))]
        logs += [*self._kind.begins(view)]
        logs += map(Log, self.roster.departures.begin(decision, self.roster.count, self.now))
        return [*told, *logs, *self._invite()]

    def _send(self, message: Release | Flush) -> list[Action]:
        return [Send(("worker", member), message) for member in sorted(self.roster.present)]
