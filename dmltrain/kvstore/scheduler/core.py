"""The scheduler's decisions: registration, barriers, lost processes, the end of the job. Pure; process.py does the I/O.

Theory of operation. Every process connects, registers and sends a heartbeat each second. The scheduler answers each
heartbeat, so that processes also notice a frozen scheduler. When all have registered, it sends `start` to all, with the
servers' addresses and each process's host. A barrier is the set of workers that have reached it. A worker sends `bye`
when it has finished; after the last `bye` the scheduler sends `shutdown` to all. The job is lost when a process misses
heartbeats for `lost_seconds`, its connection ends without `bye`, it sends `abort`, a link between two processes is lost
(lost_links.py), or a time limit passes. The scheduler then sends `abort` to all, with a reason that names the process,
or both ends of the link. What follows from a lost link, such as processes that wait for too long, is not the reason.

An elastic job goes on without a worker or a server that is lost after all were ready: views.py. Only that one gets
`abort`. A replacement registers with its rank, a worker that comes in addition with one above those of the start. It
gets `start` for itself, and joins when it is ready. The replacement of a server is ready at once.

An elastic job also goes on when its scheduler is lost, with another `incarnation` of it: resume.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dmltrain.kvstore.scheduler.actions import ALL, Action, Cut, Finish, Log, Send
from dmltrain.kvstore.scheduler.changes import Changes
from dmltrain.kvstore.scheduler.lost_links import LostLinks, Node, process
from dmltrain.kvstore.scheduler.membership.replay import ALL_NEEDED
from dmltrain.kvstore.scheduler.membership.views import Views
from dmltrain.kvstore.scheduler.peers import Barriers, Peer, Peers, StepTimes, name_of
from dmltrain.kvstore.scheduler.reports import Leaves
from dmltrain.kvstore.scheduler.resume import Resume
from dmltrain.kvstore.transport.message import (
    Abort,
    Admit,
    Barrier,
    Bye,
    Change,
    Changed,
    Failed,
    Flushed,
    HasState,
    Heartbeat,
    Leaving,
    Left,
    LinkLost,
    Message,
    Overdue,
    Ready,
    Refuse,
    Register,
    Rejoin,
    Release,
    Shutdown,
    Speed,
    Start,
    Stops,
    Superseded,
    Took,
)


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
    elastic: int = 0  # with fewer workers than this an elastic job ends; 0: the job is not elastic
    incarnation: int = 1  # later ones wait for the processes that the job has already
    lost_before: frozenset[Node] = frozenset()  # processes for which such a one does not wait
    max_workers: int = 0  # in an elastic job workers with ranks below this may come in addition
    wait_for_hosts: float = 0.0  # s, for which such a job waits before it ends
    restart_servers: int = 0  # how many replacements of lost servers such a job can get
    now: float = 0.0
    _resume: Resume | None = field(init=False)  # of a later incarnation, until the processes have come back
    _peers: Peers = field(default_factory=Peers)
    _barriers: Barriers = field(init=False)
    _links: LostLinks = field(default_factory=LostLinks)
    _views: Views = field(init=False)
    _changes: Changes = field(init=False)
    _step_times: StepTimes = field(init=False)
    _first_start: Start | None = None  # for processes that join later: they must divide keys as all others did
    _early: dict[int, Ready] = field(default_factory=dict)  # of workers that are ready to join before the first view
    _changing_since: float | None = None  # a change of view
    _began: float | None = None
    _logged: float = 0.0  # when missing processes were last logged
    _started: bool = False
    _finished: bool = False

    def __post_init__(self) -> None:
        self._views = Views(
            self.num_workers, self.num_servers, self.elastic, self.wait_for_hosts, restarts=self.restart_servers
        )
        self._barriers, self._changes = Barriers(self.num_workers), Changes(self.num_workers)
        self._step_times = StepTimes()
        resumes = self.incarnation > 1
        self._resume = (
            Resume(self.num_workers, self.num_servers, self.lost_seconds, self.lost_before) if resumes else None
        )

    def handle(self, node: Node, message: Message, now: float) -> list[Action]:
        """A message from `node`, whose role and index the handshake has proved."""
        if self._finished:
            return []
        self._advance(now)
        if isinstance(message, Superseded):
            return self._yield_to(message.incarnation)
        if self._resume:
            return self._collect(self._resume, node, message)
        handler = HANDLERS.get(type(message), NOT_FOR_THE_SCHEDULER)
        if handler.of_registered:
            peer = self._peers.get(node)
            if peer is None:
                return [Refuse(f"{name_of(node)} has not registered")]
            peer.heard = now
            if self._removed(node) or (self._views.has_left(node) and not isinstance(message, (Heartbeat, Bye))):
                return []
        if node[0] not in handler.senders or (handler.only_elastic and not self.elastic):
            return [Refuse(f"{message.op or message.kind.name} is not for the scheduler")]
        return handler.call(self, node, message)

    def change(self, change: Change) -> list[Action]:
        """The user wants to change the job's kvstore."""
        if self._finished:
            return []
        if self.elastic:
            return self._views.change(change)
        finished = [worker for worker in range(self.num_workers) if self._peers.done(("worker", worker))]
        return self._changes.ask(change, self._started, finished)

    def lost(self, node: Node, reason: str, now: float) -> list[Action]:
        """The connection to `node` has ended."""
        if self._resume:
            self._advance(now)
            self._resume.lose(node, reason)
            return self._take_over_if(self._resume.complete)
        peer = self._peers.get(node)
        if self._finished or peer is None or peer.left:
            return []
        self._advance(now)
        return self._lose(node, f"{self._peers.describe(node)} was lost: {reason}")

    def tick(self, now: float) -> list[Action]:
        """Check the time limits; call it a few times a second."""
        self._advance(now)
        if self._began is None:
            self._began = self._logged = now
        if self._finished:
            return []
        if self._resume:
            return self._tick_resume(self._resume, now)
        for node, peer in self._peers.items():
            if not peer.left and now - peer.heard > self.lost_seconds:
                return self._lose(
                    node,
                    f"{self._peers.describe(node)} missed heartbeats for {now - peer.heard:.0f} s "
                    f"(frozen, stopped, or cut off: its address is {peer.registration.host}, and it reports to "
                    f"{self.place})",
                )
        if now >= self._links.due:
            return self._judge_links()
        if not self._started:
            return self._tick_start(now)
        return self._tick_barriers(now) or self._tick_change(now) or self._views.tick()

    def _advance(self, now: float) -> None:
        suspended, self.now = now - self.now > self.lost_seconds / 2, now
        self._views.now = now
        if suspended:  # this process itself: it may still have to read heartbeats
            for peer in self._peers.values():
                peer.heard = now

    def _tick_start(self, now: float) -> list[Action]:
        assert self._began is not None
        missing = ", ".join(name_of(node) for node in self._expected() if node not in self._peers)
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
        barrier = self._barriers.overdue(now - self.wait_seconds)
        if barrier is None:
            return []
        missing = ", ".join(f"worker {worker}" for worker in sorted(barrier.missing))
        return self._abort(
            f"barrier {barrier.name!r}: {missing} did not reach it within {now - barrier.since:.0f} s: "
            "look at its log, or set a longer time (DMLTRAIN_WAIT_TIMEOUT)"
        )

    def _tick_change(self, now: float) -> list[Action]:
        """A change of view that does not end is a fault of the job."""
        if not self._views.changing:
            self._changing_since = None
            return []
        self._changing_since = now if self._changing_since is None else self._changing_since
        if now - self._changing_since <= self.wait_seconds:
            return []
        if self._views.waits_for_server:
            return self._abort(
                f"no server is left, and no replacement has come within {now - self._changing_since:.0f} s "
                "(DMLTRAIN_WAIT_TIMEOUT)"
            )
        silent = ", ".join(f"worker {member}" for member in self._views.silent)
        return self._abort(
            f"change of view: {silent} did not answer, or did not complete the op that others have, within "
            f"{now - self._changing_since:.0f} s: look at its log, or set a longer time (DMLTRAIN_WAIT_TIMEOUT)"
        )

    # -- after a scheduler that was lost --------------------------------------------------------------------------

    @property
    def resuming(self) -> bool:
        """Whether this incarnation still waits for the processes of the job."""
        return self._resume is not None

    def _yield_to(self, incarnation: int) -> list[Action]:
        """A later incarnation decides from now on. No process needs a message about it: each finds it by itself."""
        if incarnation <= self.incarnation:
            return []
        self._finished = True
        return [Finish(f"incarnation {incarnation} of the scheduler has taken over")]

    def _collect(self, resume: Resume, node: Node, message: Message) -> list[Action]:
        if isinstance(message, Heartbeat):
            return [Send(node, Heartbeat())]
        resume.take(node, message, self.now)
        return self._take_over_if(resume.complete)

    def _tick_resume(self, resume: Resume, now: float) -> list[Action]:
        assert self._began is not None
        if not resume.back and now - self._began > self.start_seconds:
            return self._abort(f"no process of the job has come back to the scheduler within {now - self._began:.0f} s")
        return self._take_over_if(now >= resume.due)

    def _take_over_if(self, complete: bool) -> list[Action]:
        """Take over from the lost scheduler. `complete`: whether all expected processes have come back; without it,
        nothing happens."""
        if not complete:
            return []
        resume, self._resume = self._resume, None
        assert resume is not None
        self._started = True
        entered = resume.entered
        if entered is None:
            return self._abort(
                "the scheduler was lost before all workers were ready for the first step: start the job again"
            )
        if resume.conflict:
            return self._abort(
                f"two schedulers have made view {entered.view.number} in different ways: start the job again from its "
                "last checkpoint"
            )
        ready = [rejoin.ready[0] for rejoin in resume.back.values() if rejoin.ready]
        if any(message.replay for message in ready):
            return self._abort("a replay cannot go on when its scheduler is lost: start it again")
        self._first_start = resume.start
        for node in dict.fromkeys([*self._expected(), *resume.expected, *resume.back]):
            ended = node[0] == "worker" and node[1] in resume.finished
            self._peers[node] = Peer(resume.registration(node), self.now, ended, ended or node not in resume.back)
        missing = {node: f"{self._peers.describe(node)} {resume.absence(node)}" for node in resume.missing}
        lost = {node[1]: reason for node, reason in missing.items() if node[0] == "worker"}
        workers = [index for role, index in resume.back if role == "worker"]
        changed = self._views.resume(entered, resume.finished, lost, (*ready, Ready())[0], workers)
        back = f"incarnation {self.incarnation} of the scheduler goes on after view {entered.view.number}"
        actions: list[Action] = [Log(back), *(Log(f"{reason}; the job goes on without it") for reason in lost.values())]
        for node, rejoin in resume.back.items():
            if self._removed(node):
                actions += self._disconnect(
                    node, f"{self._peers.describe(node)} was lost before", "removed from the job"
                )
            elif rejoin.entered != (entered,) and not self._peers[node].left:
                actions.append(Send(node, entered))
        if self._views.over:
            return [*actions, *self._end()]
        if self._views.too_few:
            return [*actions, *self._abort("; ".join([*lost.values(), self._views.too_few]), better=True)]
        actions += changed
        for node, reason in missing.items():
            actions += [] if node[0] == "worker" or self._finished else self._remove_server(node, reason, is_here=False)
        # A process that is refused here gets no answer now. It connects again, and gets the answer then.
        for node, message in resume.held:
            following = self.handle(node, message, self.now)
            actions += [action for action in following if not isinstance(action, Refuse)]
        return actions

    def _rejoin_late(self, node: Node, message: Rejoin) -> list[Action]:
        """A process comes back whose connection to this scheduler was lost, or that is too late after a change of
        schedulers. It was removed, or will be when this scheduler notices the end of its connection. Only a worker that
        has finished, or left on purpose, is accepted: the job did not wait for it."""
        view = self._views.entered
        if view and self._views.has_left(node):
            self._peers[node] = Peer(message.registration, self.now)
            knows = any(node[1] not in enter.view.members for enter in message.entered)
            return [] if knows else [Send(node, view)]
        if node[0] == "worker" and node[1] in self._views.finished:  # servers have said so, and nobody waits for it
            self._peers[node] = Peer(message.registration, self.now, done=True, left=True)
            return []
        return [Refuse(f"removed from the job: {name_of(node)} had lost its connection to {self.place}")]

    # -- losses ---------------------------------------------------------------------------------------------------

    def _lose(self, node: Node, reason: str) -> list[Action]:
        """A process was lost: an elastic job goes on without it, any other ends."""
        if self._views.has_left(node):
            self._peers[node].left = True
            self._links.forget(node)
            return []
        if node[0] == "worker" and node[1] in self._views.dismissed:
            if self._views.needs(node[1]):
                return self._abort(f"{reason}; {ALL_NEEDED}", better=True)
            self._peers[node].left = True
            self._links.forget(node)
            return []
        if self._views.is_joining(node):
            return self._drop_newcomer(node, reason)
        if self._views.survives(node):
            return self._remove(node, reason) if node[0] == "worker" else self._remove_server(node, reason)
        return self._abort(reason, self._causes.concern(node, self._peers.host))

    def _failed(self, node: Node, message: Failed) -> list[Action]:
        """A worker ends by an error of its own; the end of its link follows."""
        if self._views.survives(node):
            self._views.failed[node[1]] = message.done + 1
        elif not self._views.is_joining(node):
            return []
        return self._lose(node, f"{self._peers.describe(node)} failed: {message.error}")

    def _remove(self, node: Node, reason: str) -> list[Action]:
        """Go on without this worker."""
        changed = self._views.member_lost(node[1], reason)
        goes_on = "" if self._views.over or self._views.too_few else "; the job goes on without it"
        actions = self._disconnect(node, f"{reason}{goes_on}", f"removed from the job: {reason}")
        if self._views.over:
            return [*actions, *self._end_all()]
        if self._views.too_few:
            return [*actions, *self._abort(f"{reason}; {self._views.too_few}", better=True)]
        return actions + changed

    def _remove_server(self, node: Node, reason: str, is_here: bool = True) -> list[Action]:
        """Go on without this server. `is_here`: whether the connection of this role and index is the lost server's; it
        may be that of its replacement."""
        changed = self._views.server_lost(node[1], reason)
        waits = "no server is left, and the job waits for a replacement"
        goes_on = waits if self._views.waits_for_server else "the job goes on without it"
        stuck = self._views.stuck
        parted = self._disconnect(node, reason if stuck else f"{reason}; {goes_on}", f"removed from the job: {reason}")
        actions = parted if is_here else parted[:1]
        return [*actions, *(self._abort(f"{reason}; {stuck}", True) if stuck else changed)]

    def _unless_stuck(self, actions: list[Action]) -> list[Action]:
        """`actions`, or the end of the job if it cannot go on without the servers that were lost."""
        return self._abort(f"a server was lost: {stuck}") if (stuck := self._views.stuck) else actions

    def _drop_newcomer(self, node: Node, reason: str) -> list[Action]:
        """Go on without a process that registered to join and is in no view yet."""
        if node[0] == "worker" and self._views.needs(node[1]):
            return self._abort(f"{reason}; {ALL_NEEDED}", better=True)
        self._views.newcomer_lost(node)
        return self._unless_stuck(
            self._disconnect(node, f"{reason}, before it had joined", f"did not join the job: {reason}")
        )

    def _disconnect(self, node: Node, log: str, reason: str) -> list[Action]:
        """End the connection to a process that the job goes on without."""
        self._peers[node].left = True
        self._links.forget(node)
        return [Log(log), Send(node, Abort(reason)), Cut(node)]

    @property
    def _causes(self) -> LostLinks:
        """The lost links that still count. Those with an end that has left the job since are forgotten."""
        self._links.keep(self._is_relevant)
        return self._links

    def _is_relevant(self, lost: LinkLost) -> bool:
        """Whether this lost link counts: both ends are processes of the job, or its own end is about to join."""
        own, ends = process(lost.own), (process(lost.own), process(lost.peer))
        if any(self._removed(end) for end in ends) or self._is_of_another(lost):
            return False
        return self._views.is_joining(own) or not any(map(self._is_no_member, ends))

    def _is_of_another(self, lost: LinkLost) -> bool:
        """Whether a worker's lost link was to a server that this view has replaced."""
        view, (role, number) = self._views.view, process(lost.peer)
        is_new = view is not None and role == "server" and number in view.joined_servers
        return is_new and view is not None and lost.view < view.number

    def _judge_links(self) -> list[Action]:
        """No better cause than the lost links was found in time."""
        if not self._views.view:
            return self._abort(str(self._links.cause))
        links, actions = self._causes.all, list[Action]()
        for node in self._views.who_is_cut_off(links):
            if not self._finished and (self._views.is_joining(node) or not self._is_no_member(node)):
                cause = next(str(link) for link in links if node in (process(link.own), process(link.peer)))
                actions += self._lose(node, cause)
        return actions

    def _removed(self, node: Node) -> bool:
        """Whether an elastic job has gone on without this process."""
        if node[0] == "server":
            return self._views.view is not None and self._views.is_lost(node[1])
        return node[1] in self._views.removed

    def _is_no_member(self, node: Node) -> bool:
        """Whether this process is no member of the present view. Its lost links mean nothing then: they may even be
        those of an earlier process with this role and index."""
        if self._views.view is None:
            return self._removed(node)
        if node[0] != "worker":
            return node[1] in self._views.lost_servers
        views, member = self._views, node[1]
        return member not in views.present and (member not in views.dismissed or views.has_left(node))

    # -- registration, barriers, the end --------------------------------------------------------------------------

    def _ready(self, member: int, message: Ready) -> list[Action]:
        node, views = ("worker", member), self._views
        if views.is_joining(node) and views.view is None:
            self._early[member] = message
            return []
        if views.is_joining(node) and (found := views.differences(message.facts)):
            return self._drop_newcomer(
                node, f"{self._peers.describe(node)} is not like the job's other workers: {found}"
            )
        actions = views.ready(
            member, message, self._peers.hosts(self.num_workers if views.view is None else self.ranks)
        )
        while self._early and views.view:
            rank, early = self._early.popitem()
            actions += self._ready(rank, early) if views.is_joining(("worker", rank)) else []
        return actions

    def _register(self, node: Node, message: Register) -> list[Action]:
        is_new = self._may_come_later(node) and node not in self._peers
        if node not in self._expected() and not self._may_come_later(node):
            return [
                Refuse(
                    f"{name_of(node)} is not part of this job of {self.num_workers} workers "
                    f"and {self.num_servers} servers"
                )
            ]
        before = self._peers.get(node)
        is_free = self._removed(node) or (self._views.has_left(node) and bool(before and before.left))
        if is_new or (is_free and before):
            return self._accept_newcomer(node, message, "to join" if is_new else "as a replacement")
        if node in self._peers:
            host_name = self._peers[node].registration.host_name
            return [Refuse(f"{name_of(node)} is already registered, from host {host_name}")]
        self._peers[node] = Peer(message, self.now)
        if any(other not in self._peers for other in self._expected()):
            return []
        self._started, self._first_start = True, self._peers.start(self.num_workers, self.num_servers, self.facts)
        return [
            Send(ALL, self._first_start),
            Log(f"all registered: {self.num_workers} workers, {self.num_servers} servers"),
        ]

    def _accept_newcomer(self, node: Node, message: Register, how: str) -> list[Action]:
        """Accept a process in addition to those of the start, or as a replacement. The job may not have begun yet."""
        self._peers[node] = Peer(message, self.now)
        changed: list[Action] = []
        if node[0] == "worker":
            self._views.newcomer_registered(node[1])
        else:
            changed = self._views.server_registered(node[1], self._peers.address(node[1]))
        views = self._views
        start = self._first_start and replace(self._first_start, lost=views.lost_servers, new_servers=views.new_servers)
        sends = [Send(node, start)] if start else []  # else it comes for all
        return self._unless_stuck([*sends, Log(f"{self._peers.describe(node)} has come {how}"), *changed])

    def _may_come_later(self, node: Node) -> bool:
        """Whether a process with this rank may come in addition to those of the start."""
        return node[0] == "worker" and bool(self.elastic) and self.num_workers <= node[1] < self.ranks

    @property
    def ranks(self) -> int:
        """The number of ranks that workers can have."""
        return max(self.num_workers, self.max_workers)

    def _barrier(self, node: Node, message: Barrier) -> list[Action]:
        if message.view:
            return self._views.barrier(node[1], message) or self._abort_if_barrier_hangs()
        barrier = self._barriers.reach(message.id, node[1], self.now)
        if gone := [worker for worker in sorted(barrier.missing) if self._peers.done(("worker", worker))]:
            return self._abort(f"barrier {barrier.name!r}: worker {gone[0]} has finished and will not reach it")
        if barrier.missing:
            return []
        return [Send(("worker", w), Release(barrier.name)) for w in range(self.num_workers)]

    def _abort_if_barrier_hangs(self) -> list[Action]:
        """End the job if a barrier of an elastic job can never be complete: that is a fault of the program."""
        if waits := self._views.hanging_barrier():
            return self._abort(f"barrier {waits[0]!r}: worker {waits[1]} has finished and will not reach it")
        return []

    def _bye(self, node: Node, message: Bye) -> list[Action]:
        self._peers[node].done, self._peers[node].left = True, not message.stays
        if self._views.has_left(node):
            self._links.forget(node)
            return []
        if self._views.is_joining(node):
            return self._drop_newcomer(node, f"{self._peers.describe(node)} has left")
        if node[0] == "worker" and self._views.view:
            self._links.forget(node)
            changed = (
                self._unless_stuck(self._views.member_finished(node[1], message.done)) + self._abort_if_barrier_hangs()
            )
            return changed if self._views.present or self._finished else self._end_all()
        if node[0] == "worker" and (barrier := self._barriers.waiting_for(node[1])):
            return self._abort(f"barrier {barrier.name!r}: {name_of(node)} has finished and will not reach it")
        actions = self._changes.left(node[1]) if node[0] == "worker" else []
        if not all(self._peers.done(("worker", w)) for w in range(self.num_workers)):
            stays = [Log(f"{name_of(node)} has finished, and still sums for its host")] if message.stays else []
            return [*actions, *stays]
        return [*actions, *self._end()]

    def _end_all(self) -> list[Action]:
        """No worker is left: the job has ended, as planned or with too few workers."""
        return self._abort(self._views.ends, better=True) if self._views.ends else self._end()

    def _end(self) -> list[Action]:
        self._finished = True
        return [Send(ALL, Shutdown()), Finish()]

    def _abort(self, reason: str, better: bool = False) -> list[Action]:
        """End the job. `better`: whether `reason` is a better cause than a lost link, if one was reported."""
        self._finished = True
        if self._causes and not better:
            reason = str(self._causes.cause)
        return [Send(ALL, Abort(reason)), Finish(reason)]

    def _expected(self) -> list[Node]:
        return [("server", s) for s in range(self.num_servers)] + [("worker", w) for w in range(self.num_workers)]


def _aborted(core: SchedulerCore, node: Node, message: Abort) -> list[Action]:
    """A process ends the job, or, before it has joined, only itself."""
    reason = f"{core._peers.describe(node)}: {message.reason}"
    if core._views.is_joining(node):
        return core._drop_newcomer(node, reason)
    return core._abort(reason, better=core._causes.concern(node))


def _leaving(core: SchedulerCore, node: Node, message: Leaving) -> list[Action]:
    changed = core._views.notice(node[1], message)
    if changed is None:
        return []
    text = f"{core._peers.describe(node)} leaves on purpose: {message.reason}"
    return [Log(text, Leaves(node[1], message.reason)), *changed]


def _took(core: SchedulerCore, node: Node, message: Took) -> list[Action]:
    workers = core._views.present if core.elastic else range(core.num_workers)
    return core._step_times.take(node[1], message.seconds, workers)


def _link_lost(core: SchedulerCore, node: Node, lost: LinkLost) -> list[Action]:
    if core._is_relevant(lost):
        core._links.add(lost, core.now)
    return []


def _nothing(core: SchedulerCore, node: Node, message: Message) -> list[Action]:
    return []


def _of_change(core: SchedulerCore, node: Node, message: Stops | Changed) -> list[Action]:
    return core._changes.take(node[1], message)


WORKER, SERVER = ("worker",), ("server",)
ALL_ROLES = (*WORKER, *SERVER)


@dataclass(frozen=True)
class Handler:
    """Which processes may send a message to the scheduler, and what it does then, in words for docs/protocol.md."""

    senders: tuple[str, ...]
    does: str
    call: Callable[[SchedulerCore, Node, Any], list[Action]]
    only_elastic: bool = False
    of_registered: bool = True  # only from processes that have registered


NOT_FOR_THE_SCHEDULER = Handler((), "refuses it", _nothing)
# What a scheduler does with each message. One of a later incarnation first collects all but `superseded` (resume.py).
HANDLERS: Mapping[type[Message], Handler] = {
    Register: Handler(
        ALL_ROLES,
        "sends `start` to all when all have registered; lets replacements and additional workers join",
        SchedulerCore._register,
        of_registered=False,
    ),
    Rejoin: Handler(
        ALL_ROLES,
        "sends the newest `enter` to a worker that has left on purpose, and refuses any other: it was removed",
        SchedulerCore._rejoin_late,
        of_registered=False,
    ),
    Heartbeat: Handler(ALL_ROLES, "answers it", lambda core, node, message: [Send(node, Heartbeat())]),
    Barrier: Handler(WORKER, "sends `release` to all when all have reached it", SchedulerCore._barrier),
    Bye: Handler(ALL_ROLES, "ends the job after the last worker's", SchedulerCore._bye),
    Abort: Handler(ALL_ROLES, "ends the job; a newcomer's ends only the newcomer", _aborted),
    Overdue: Handler(
        ALL_ROLES,
        "ends the job",
        lambda core, node, message: core._abort(f"{core._peers.describe(node)}: {message.reason}"),
    ),
    LinkLost: Handler(
        ALL_ROLES,
        "waits for a better cause; then ends the job, or goes on without the process that is cut off",
        _link_lost,
    ),
    Failed: Handler(WORKER, "goes on without the worker", SchedulerCore._failed, only_elastic=True),
    Ready: Handler(
        WORKER,
        "begins view 1 when all are ready; lets a newcomer join if its facts are those of the others",
        lambda core, node, message: core._ready(node[1], message),
        only_elastic=True,
    ),
    Flushed: Handler(
        WORKER,
        "begins the next view when all members have said so",
        lambda core, node, message: core._unless_stuck(core._views.flushed(node[1], message)),
        only_elastic=True,
    ),
    Admit: Handler(
        WORKER,
        "begins the change of view that waits for the leader",
        lambda core, node, message: core._views.admit(node[1], message),
        only_elastic=True,
    ),
    Leaving: Handler(WORKER, "plans a view without the worker", _leaving, only_elastic=True),
    Speed: Handler(
        WORKER,
        "divides the samples anew if the speeds have changed enough",
        lambda core, node, message: core._views.speed(node[1], message, core.now),
        only_elastic=True,
    ),
    HasState: Handler(
        WORKER,
        "notes that the worker can give the state to others",
        lambda core, node, message: core._views.has_state(node[1], message),
        only_elastic=True,
    ),
    Left: Handler(SERVER, "nothing: the worker says `bye`; see [Another scheduler](#another-scheduler)", _nothing),
    Stops: Handler(WORKER, "names the step when all have answered", _of_change),
    Changed: Handler(WORKER, "logs the change when all have made it", _of_change),
    Took: Handler(WORKER, "logs who computes longer than the median", _took),
}
