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
from dmltrain.kvstore.scheduler.lost_links import Members, Node, cut_off
from dmltrain.kvstore.scheduler.membership.balance import Balance
from dmltrain.kvstore.scheduler.membership.departures import Decision, Departures
from dmltrain.kvstore.scheduler.membership.flushing import NOTHING, Flushing
from dmltrain.kvstore.scheduler.membership.kind_change import KindChange
from dmltrain.kvstore.scheduler.membership.newcomers import Newcomers
from dmltrain.kvstore.scheduler.membership.replay import ALL_NEEDED, FIXED, Replay
from dmltrain.kvstore.scheduler.membership.server_losses import ALL_SERVERS_NEEDED, NO_SERVER, ServerLosses
from dmltrain.kvstore.scheduler.reports import Viewed
from dmltrain.kvstore.transport.message import (
    Admit,
    Barrier,
    Change,
    Enter,
    Flush,
    Flushed,
    HasState,
    Invite,
    Leaving,
    LinkLost,
    NewServer,
    Ready,
    Release,
    ServerAddress,
    Speed,
)
from dmltrain.kvstore.view import EQUAL, Lost, View, barrier_of


@dataclass
class Views:
    """`workers` and `servers`: how many the job has at its start. `minimum`: with fewer workers the job ends, after it
    has waited `patience` seconds for more. Members are identified by rank. `now`: seconds of the core's clock, set by
    the core. `restarts`: how many replacements of servers there can be."""

    workers: int
    servers: int
    minimum: int
    patience: float = 0.0
    now: float = 0.0
    restarts: int = 0
    view: View | None = None  # until all are ready
    entered: Enter | None = None  # the message with which its members were told of it
    finished: dict[int, int] = field(default_factory=dict)  # member that has left at its end -> the last op it held
    dismissed: set[int] = field(default_factory=set)  # members that a replay has let go
    failed: dict[int, int] = field(default_factory=dict)  # member that ends by an error of its own -> in which op
    removed: set[int] = field(default_factory=set)  # members that were lost, and have no replacement
    facts: Mapping[str, Any] = field(default_factory=dict)  # that are the same for all workers
    _kvstore: tuple[str, float] = ("", 0.0)  # its type and staleness at the start; see View
    _present: set[int] = field(init=False)
    _ready: set[int] = field(default_factory=set)
    _replay: Replay = field(default_factory=Replay)
    _newcomers: Newcomers = field(default_factory=Newcomers)
    _flushing: Flushing = field(default_factory=Flushing)
    _lost: list[Lost] = field(default_factory=list)  # since the view began
    _lacking: set[int] = field(default_factory=set)  # members that may not have the state of training yet
    _barriers: dict[str, set[int]] = field(default_factory=dict)  # of this view
    _servers: ServerLosses = field(init=False)
    _balance: Balance = field(default_factory=lambda: Balance(EQUAL))
    _kind: KindChange = field(default_factory=KindChange)
    _departures: Departures = field(init=False)
    _resumed: bool = False  # until the next view: the scheduler before may not have released all barriers

    def __post_init__(self) -> None:
        self._present = set(range(self.workers))
        self._servers = ServerLosses(set(range(self.servers)), self.restarts)
        self._departures = Departures(self.minimum, self.patience)

    @property
    def changing(self) -> bool:
        """Whether a change of view has begun and has not ended."""
        return self._flushing.active

    @property
    def present(self) -> list[int]:
        """The members that are neither lost nor at their end."""
        return sorted(self._present)

    @property
    def silent(self) -> list[int]:
        """The members that have not answered the flush."""
        return sorted(self._flushing.behind(self._present, self._target))

    def survives(self, node: Node) -> bool:
        """Whether the job goes on without this process, if enough others are left."""
        return self.view is not None and node[1] in (self._present if node[0] == "worker" else self._servers.present)

    @property
    def lost_servers(self) -> tuple[int, ...]:
        """The servers that the present view lacks: lost ones, and replacements that join with a later view."""
        return tuple(number for number in range(self.servers) if number not in self._servers.present)

    def is_lost(self, server: int) -> bool:
        """Whether this server was lost, and no replacement has come."""
        return server not in self._servers.present and server not in self._servers.coming

    @property
    def new_servers(self) -> tuple[NewServer, ...]:
        """The servers of the present view that are not where they were at the start."""
        return self._servers.new

    @property
    def waits_for_server(self) -> bool:
        """Whether no server is left, and the next view begins when a replacement comes."""
        return self._servers.waits

    def server_registered(self, number: int, address: ServerAddress) -> list[Action]:
        """A replacement of a lost server has registered. Call `stuck` after it."""
        self._servers.registered(number, address)
        return self._proceed() if self.changing else self._invite()

    def ready(self, member: int, message: Ready, hosts: Sequence[tuple[int, ...]]) -> list[Action]:
        """A worker is ready. `hosts`: the ranks on each host. The first view begins when all workers of the start are
        ready. A later worker waits until it is admitted."""
        if self.view is not None:
            return self._newcomer(member, next(host for host in hosts if member in host))
        self._ready.add(member)
        if member == 0:
            self.facts = message.facts
            self._replay = Replay(message.replay, tuple(range(self.servers)))
            self._balance = Balance(message.balance)
            self._kvstore = message.kvstore, message.staleness
            self._kind.why_fixed = FIXED if self._replay.active else message.why_fixed
        if len(self._ready) < self.workers:
            return []
        if self._replay.active:
            return self._begin_view(self._replay.next())
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
        view = entered.view
        self.view, self.entered, self.finished, self.facts = view, entered, dict(finished), ready.facts
        self._balance, self._kind.why_fixed = Balance(ready.balance), ready.why_fixed
        self._present = set(view.members).difference(finished, lost)
        self._departures.gone = set(entered.departed)
        self._departures.holding, self._departures.ends = entered.holds, entered.ends
        apart = {*self._present, *finished, *self._departures.gone}
        self.removed = {*range(self.workers), *view.members, *back}.difference(apart)
        self._lost += [Lost(member, reason) for member, reason in sorted(lost.items())]
        self._lacking = {*view.joined, *view.behind}
        self._servers.resume(view.servers, entered.new_servers)
        self._resumed = True
        return self._begin_turn() if self._present else []

    # -- newcomers ------------------------------------------------------------------------------------------------

    def newcomer_registered(self, member: int) -> None:
        """A replacement of a removed worker, or an additional one, has registered."""
        self.removed.discard(member)
        self.dismissed.discard(member)
        self._departures.gone.discard(member)
        self._newcomers.registered(member)

    def is_joining(self, node: Node) -> bool:
        """Whether this process has registered to join, and is in no view yet."""
        return node[1] in (self._newcomers.joining if node[0] == "worker" else self._servers.coming)

    def newcomer_lost(self, node: Node) -> None:
        """A process was lost before it was in a view."""
        member = node[1]
        if node[0] == "server":
            del self._servers.coming[member]
            return
        self._newcomers.lost(member)
        self.removed.add(member)

    def differences(self, facts: Mapping[str, Any]) -> str:
        """How the facts of a newcomer differ from those of the job; empty if they do not."""
        names = sorted(name for name in {*self.facts, *facts} if self.facts.get(name) != facts.get(name))
        return ", ".join(f"{name} {facts.get(name)!s:.80} (the job: {self.facts.get(name)!s:.80})" for name in names)

    def admit(self, member: int, message: Admit) -> list[Action]:
        """The leader waits before a round of training."""
        if not self._is_now(message.view, member):
            return []
        self._newcomers.admit(member)
        return self._begin_turn()

    def _newcomer(self, member: int, host: tuple[int, ...]) -> list[Action]:
        if not self._newcomers.ready(member, host):
            return []
        return self._end_as_planned() if self._replay.active and not self.changing else self._invite()

    def _invite(self) -> list[Action]:
        """Tell the leader that a change of view waits, if there is one, and if the leader has to ask for it."""
        leaders = [member for member in self.view.by_duty if member in self._present] if self.view else []
        if self._replay.active or self.changing or not leaders or self._departures.ends or self._passes:
            return []
        waiting = self._newcomers.waiting
        if self._departures.holding:
            enough = self._departures.enough(len(self._present) + len(waiting))
            return self._begin_turn() if enough or self._departures.notices else []
        wants = self._balance.proposal or self._departures.wanted or self._kind.waits
        if not (waiting or self._servers.coming or wants):
            return []
        return [Send(("worker", leaders[0]), Invite(tuple(sorted(waiting))))]

    def speed(self, member: int, message: Speed, now: float) -> list[Action]:
        """A member has measured its speed. If samples should be divided anew, the leader asks for the change."""
        if self._replay.active or not self._is_now(message.view, member):
            return []
        assert self.view is not None
        return self._invite() if self._balance.report(self.view, member, message.samples, now) else []

    def has_state(self, member: int, message: HasState) -> list[Action]:
        """A member that lacked the state of training now has it."""
        if self.view is not None and message.view == self.view.number:
            self._lacking.discard(member)
        return []

    def change(self, change: Change) -> list[Action]:
        """The user wants to change the job's kvstore."""
        actions = self._kind.ask(change, self.view, bool(self.finished or self.ends))
        return [*actions, *self._invite()]

    # -- departures -----------------------------------------------------------------------------------------------

    def notice(self, member: int, message: Leaving) -> list[Action] | None:
        """A member gives notice that it leaves on purpose. None if the notice does not count."""
        if self.view is None or self._replay.active:
            return None
        if member not in self._present or member in self._departures.notices:
            return None
        self._departures.notice(member, message.reason, message.residuals)
        return self._invite()

    def has_left(self, node: Node) -> bool:
        """Whether this process has left on purpose, and no replacement has come."""
        return node[0] == "worker" and node[1] in self._departures.gone

    @property
    def ends(self) -> str:
        """Why the job ends before its time, or empty."""
        return self._departures.ends

    def tick(self) -> list[Action]:
        """Begin a change of view if the job has waited for more workers for long enough."""
        return self._begin_turn() if not self.changing and self._departures.overdue(self.now) else []

    # -- losses and ends ------------------------------------------------------------------------------------------

    def member_lost(self, member: int, reason: str) -> list[Action]:
        """A member was lost; see `survives`. Call `too_few` after it."""
        self._present.discard(member)
        self.removed.add(member)
        self._lost.append(Lost(member, reason, self.failed.pop(member, 0)))
        self._departures.forget(member)
        self._newcomers.member_lost(member)
        return self._begin_turn() if self._present else []

    def server_lost(self, number: int, reason: str) -> list[Action]:
        """A server was lost; see `survives`. Call `stuck` after it."""
        self._servers.lost(number, reason)
        return self._begin_turn() if self._present else []

    @property
    def stuck(self) -> str:
        """Why the job cannot go on without the servers that were lost, or empty."""
        if self._replay.active and len(self._servers.present) < self.servers:
            return ALL_SERVERS_NEEDED
        if self._servers.none and not self._servers.waits:
            return NO_SERVER
        if self.view is None or not self.changing or not self._flushing.complete(self._present):
            return ""
        target = self._target
        behind = self._flushing.behind(self._present, target)
        if self._servers.can_complete(target) or not behind or behind != self._present:
            return ""
        return (
            f"only workers that have finished have its results of op {target}: start the job again from its last "
            "checkpoint"
        )

    @property
    def too_few(self) -> str:
        """Why the job cannot go on with the workers that are left, or empty."""
        count = len(self._present) + len(self.finished)
        if not count or (count < self.minimum and not (self.patience or self.ends)):
            left = "no worker is left" if not count else f"{count} worker{'s are' if count > 1 else ' is'} left"
            return f"{left}, and --min-workers is {self.minimum}"
        if self._replay.active:
            return ALL_NEEDED
        return ""

    @property
    def over(self) -> bool:
        """Whether no member is present, and at least one has finished: that one held the last op of the job."""
        return not self._present and bool(self.finished)

    def member_finished(self, member: int, done: int) -> list[Action]:
        """A member has finished."""
        if self.view is None or member not in self._present:
            return []
        self._present.remove(member)
        self._departures.forget(member)
        self.finished[member] = max(done, self.view.base)
        actions: list[Action] = [*self._kind.cancel()]
        return [*actions, *self._proceed()] if self.changing and self._present else actions

    def flushed(self, member: int, message: Flushed) -> list[Action]:
        """A member reports which op it holds."""
        if self.view is None or member not in self._present or message.view != self.view.number:
            return []
        if not self._flushing.expects(message.turn):
            return []
        self._flushing.reports[member] = message.done
        # This matters only if another member holds that op (ServerLosses.can_complete): then all had reached the
        # barrier.
        if message.met:
            self._servers.released(barrier_of(message.done + 1))
        return self._proceed() if self.changing or self._passes else self._end_as_planned()

    @property
    def _passes(self) -> bool:
        """Whether this view has a few ops only, after which the next view follows: members hand over residuals, or
        complete their steps."""
        return bool(self.view and self.view.is_passing) and not self._replay.active

    def barrier(self, member: int, message: Barrier) -> list[Action]:
        """A member has reached a barrier. If a change of view interrupts a barrier, the members of the next view wait
        for it again."""
        if not self._is_now(message.view, member):
            return []
        assert self.view is not None
        arrived = self._barriers.setdefault(message.id, set())
        arrived.add(member)
        if not arrived.issuperset(self.view.members):
            return []
        del self._barriers[message.id]
        self._servers.released(message.id)
        return self._send(Release(message.id, message.view))

    def hanging_barrier(self) -> tuple[str, int] | None:
        """A barrier that can never be complete, and the member that has finished without reaching it; None: no such
        barrier."""
        for name, arrived in self._barriers.items():
            for member in self.finished:
                if self.view is not None and member in self.view.members and member not in arrived:
                    return name, member
        return None

    def who_is_cut_off(self, links: Sequence[LinkLost]) -> list[Node]:
        """The processes to remove because of lost links between workers and servers. A member that has finished counts
        as one that has lost no link, because it has left all servers regularly. It holds the state of training, so no
        other member has to."""
        count = len(self._present) + len(self.finished)
        holders = () if self.finished else self._present - self._lacking
        return cut_off(links, Members(count, holders, self._newcomers.joining, self._servers.present))

    # -- the change -----------------------------------------------------------------------------------------------

    def _is_now(self, view: int, member: int) -> bool:
        """Whether a member's message about this view still counts: the view is the present one, no change of it has
        begun, and the member is present."""
        return self.view is not None and not self.changing and view == self.view.number and member in self._present

    @property
    def _target(self) -> int:
        """The last op that any present or finished member holds, as far as is known."""
        held = self._flushing.highest(self._present)
        return max(self.view.base if self.view else 0, held, *self.finished.values())

    def _begin_turn(self) -> list[Action]:
        """Begin a turn of a change of view: ask all present members which op they hold."""
        assert self.view is not None
        self._flushing.begin_turn()
        self._barriers.clear()
        return self._send(Flush(self.view.number, self._flushing.turn, NOTHING))

    def _proceed(self) -> list[Action]:
        """Continue the change of view, if all present members have answered."""
        assert self.view is not None
        if not self._flushing.complete(self._present):
            return []
        target = self._target
        late = self._flushing.behind(self._present, target)
        if late and self._servers.can_complete(target):
            return self._permit(late, target)
        if self.stuck or self._servers.none:
            return []
        if target > self.view.base:
            self._departures.residuals.difference_update(self.view.hands_over)
        decision = self._decide(late)
        gone = (set(self.view.members) - self._present) | decision.leaves.keys()
        left = tuple(Lost(member, reason) for member, reason in sorted(decision.leaves.items()))
        view = self.view.without(gone, target, tuple(self._lost), left)
        if decision.admits:
            view = view.joined_by(self._newcomers.admitted)
        if decision.hands_over:
            view = replace(view, until=target + 1, hands_over=decision.hands_over)
        view = self._servers.next_view(view, late)
        between = self._newcomers.between_rounds and decision.trains and not late
        view = self._kind.next_view(self.view, view, between, drained=not self.changing)
        return self._begin_view(self._balance.next_view(self.view, view), decision)

    def _decide(self, late: set[int]) -> Decision:
        """What comes with the next view. Members may leave, join or wait only if all are between two rounds: because
        they wait there already, or the leader waits there, or they have handed over residuals. They are not between two
        rounds if some are `late`: these still lack the outcome of a round that others hold."""
        assert self.view is not None
        departures, newcomers = self._departures, self._newcomers
        if departures.ends:
            return Decision(ends=departures.ends)
        if departures.holding:
            newcomers.admit_but(self.view.members)
        elif late or not (newcomers.between_rounds or self.view.hands_over):
            return Decision()
        return departures.decide(self._present, len(newcomers.admitted), self.now)

    def _permit(self, late: set[int], target: int) -> list[Action]:
        """Permit the members that are behind to recognise the target. They answer in the same turn."""
        assert self.view is not None
        permit: list[Release | Flush] = [Flush(self.view.number, self._flushing.turn, target)]
        # The lost scheduler may have sent this release to some members only. The member that holds the target has
        # passed its last barrier, so all members had reached it.
        if self._resumed:
            permit.insert(0, Release(barrier_of(target), self.view.number))
        return [Send(("worker", member), message) for member in self._flushing.permit(late) for message in permit]

    def _end_as_planned(self) -> list[Action]:
        if not self._flushing.complete(self._present) or self._replay.ended:
            return []
        if missing := self._replay.missing(self._newcomers.waiting.keys() | self.dismissed):
            names = ", ".join(f"worker {member}" for member in missing)
            return [Log(f"the replay waits for {names} to join, as in the replayed job")]
        return self._begin_view(self._replay.next())

    def _begin_view(self, view: View, decision: Decision = Decision()) -> list[Action]:  # noqa: B008  it is frozen
        dismissed = self._present.difference(view.members)
        self._servers.begin(view)
        new, departed = self._servers.new, tuple(sorted(self._departures.gone | decision.leaves.keys()))
        enter = Enter(view, holds=decision.holds, ends=decision.ends, new_servers=new, departed=departed)
        to_dismissed = [
            Send(("worker", member), Enter(view, self.needs(member), new_servers=new, departed=departed))
            for member in sorted(dismissed)
        ]
        self._lacking = self._members_without_state(view)
        self.view, self.entered, self.dismissed = view, enter, (self.dismissed | dismissed).difference(view.members)
        self._present = (self._present - dismissed) | set(view.joined)
        self._newcomers.begin(view)
        self._flushing.end()
        self._resumed = False
        self._lost.clear()
        self._barriers.clear()
        servers = [Send(("server", number), enter) for number in view.servers]
        names = ", ".join(str(member) for member in view.members)
        text = f"view {view.number} after op {view.base}: workers {names}"
        logs = [Log(text, Viewed(view.number, view.members))]
        logs += [*self._kind.begins(view), *(Log(text) for text in self._depart(decision) if text)]
        return [*servers, *self._send(enter), *to_dismissed, *logs, *self._invite()]

    def _members_without_state(self, view: View) -> set[int]:
        """The members of a view that lack the state of training when it begins. They get it in the first op of this
        view, or of a later one if that op is aborted, and report it."""
        had_no_op = self.view is not None and view.base == self.view.base
        before = self._lacking if had_no_op else set()
        return {*before, *view.joined, *view.behind}.intersection(view.members)

    def _depart(self, decision: Decision) -> list[str]:
        """A view begins with this decision. Returns the texts for the log; some may be empty."""
        departures = self._departures
        for member in decision.leaves:
            departures.forget(member)
        departures.gone |= decision.leaves.keys()
        ending = f"the job ends: {decision.ends}" if decision.ends and not departures.ends else ""
        departures.holding, departures.ends = decision.holds, decision.ends
        return [ending, departures.observe(len(self._present) + len(self.finished), self.now)]

    def needs(self, member: int) -> bool:
        """Whether a later view of the replay has this member."""
        return self._replay.needs(member)

    def _send(self, message: Release | Flush | Enter) -> list[Action]:
        return [Send(("worker", member), message) for member in self.present]
