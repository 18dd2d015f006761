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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dmltrain.kvstore.scheduler.actions import AGENT, ALL, Action, Finish, Log, Send
from dmltrain.kvstore.scheduler.changes import AfterStep
from dmltrain.kvstore.scheduler.ending import Ending
from dmltrain.kvstore.scheduler.losses import Losses
from dmltrain.kvstore.scheduler.lost_links import Node
from dmltrain.kvstore.scheduler.membership.newcomers import differences
from dmltrain.kvstore.scheduler.membership.views import Views
from dmltrain.kvstore.scheduler.peers import Barriers, Peer, Peers, StepTimes, name_of
from dmltrain.kvstore.scheduler.reports import Leaves
from dmltrain.kvstore.scheduler.resume import Resume
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.changes import Change, Changed, Stops, Took
from dmltrain.kvstore.transport.message.handshake import Refuse
from dmltrain.kvstore.transport.message.job import Abort, Barrier, Bye, Heartbeat, LinkLost, Overdue, Register, Start
from dmltrain.kvstore.transport.message.views import (
    Admit,
    Failed,
    Flushed,
    HasState,
    Leaving,
    Left,
    Ready,
    Rejoin,
    Speed,
    Superseded,
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
    _peers: Peers = field(init=False)
    _barriers: Barriers = field(init=False)
    _views: Views = field(init=False)
    _ending: Ending = field(init=False)
    _losses: Losses = field(init=False)
    _after_step: AfterStep = field(init=False)
    _step_times: StepTimes = field(init=False)
    _first_start: Start | None = None  # for processes that join later: they must divide keys as all others did
    _early: dict[int, Ready] = field(default_factory=dict)  # of workers that are ready to join before the first view
    _changing_since: float | None = None  # a change of view
    _began: float | None = None
    _logged: float = 0.0  # when missing processes were last logged
    _started: bool = False

    def __post_init__(self) -> None:
        self._views = Views(
            self.num_workers, self.num_servers, self.elastic, self.wait_for_hosts, restarts=self.restart_servers
        )
        self._peers = Peers(self.num_workers, self.num_servers, self.max_workers if self.elastic else 0)
        self._ending = Ending(self._views.roster.counts)
        self._losses = Losses(self._peers, self._views, self._ending)
        self._barriers, self._step_times = Barriers(range(self.num_workers)), StepTimes()
        self._after_step = AfterStep(self.num_workers, self.num_servers)
        resumes = self.incarnation > 1
        self._resume = (
            Resume(self.num_workers, self.num_servers, self.lost_seconds, self.lost_before) if resumes else None
        )

    def handle(self, node: Node, message: Message, now: float) -> list[Action]:
        """A message from `node`, whose role and index the handshake has proved."""
        if self._ending.finished:
            return []
        self._advance(now)
        if isinstance(message, Superseded):
            return self._yield_to(message.incarnation)
        if self._resume and node != AGENT:
            return self._collect(self._resume, node, message)
        handler = HANDLERS.get(type(message), NOT_FOR_THE_SCHEDULER)
        if handler.of_registered:
            peer = self._peers.get(node)
            if peer is None:
                return [Refuse(f"{name_of(node)} has not registered")]
            peer.heard = now
            roster = self._views.roster
            if roster.is_removed(node) or (roster.has_left(node) and not isinstance(message, (Heartbeat, Bye))):
                return []
        if node[0] not in handler.senders or (handler.only_elastic and not self.elastic):
            return [Refuse(f"{message.op or message.kind.name} is not for the scheduler")]
        return handler.call(self, node, message)

    def lost(self, node: Node, reason: str, now: float) -> list[Action]:
        """The connection to `node` has ended."""
        if self._resume:
            self._advance(now)
            self._resume.lose(node, reason)
            return self._take_over_if(self._resume.complete)
        peer = self._peers.get(node)
        if self._ending.finished or peer is None or peer.left:
            return []
        self._advance(now)
        return self._losses.lose(node, f"{self._peers.describe(node)} was lost: {reason}")

    def tick(self, now: float) -> list[Action]:
        """Check the time limits; call it a few times a second."""
        self._advance(now)
        if self._began is None:
            self._began = self._logged = now
        if self._ending.finished:
            return []
        if self._resume:
            return self._tick_resume(self._resume, now)
        for node, peer in self._peers.items():
            if not peer.left and now - peer.heard > self.lost_seconds:
                return self._losses.lose(
                    node,
                    f"{self._peers.describe(node)} missed heartbeats for {now - peer.heard:.0f} s "
                    f"(frozen, stopped, or cut off: its address is {peer.registration.host}, and it reports to "
                    f"{self.place})",
                )
        if now >= self._ending.links.due:
            return self._losses.judge_links()
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
        missing = self._peers.missing
        if now - self._began > self.start_seconds:
            return self._ending.abort(
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
        return self._ending.abort(
            f"barrier {barrier.name!r}: {missing} did not reach it within {now - barrier.since:.0f} s: "
            "look at its log, or set a longer time (DMLTRAIN_WAIT_TIMEOUT)"
        )

    def _tick_change(self, now: float) -> list[Action]:
        """A change of view that does not end is a fault of the job."""
        if not self._views.flushing.active:
            self._changing_since = None
            return []
        self._changing_since = now if self._changing_since is None else self._changing_since
        if now - self._changing_since <= self.wait_seconds:
            return []
        if self._views.roster.server_losses.waits:
            return self._ending.abort(
                f"no server is left, and no replacement has come within {now - self._changing_since:.0f} s "
                "(DMLTRAIN_WAIT_TIMEOUT)"
            )
        silent = ", ".join(f"worker {member}" for member in sorted(self._views.flushing.behind))
        return self._ending.abort(
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
        self._ending.finished = True
        return [Finish(f"incarnation {incarnation} of the scheduler has taken over")]

    def _collect(self, resume: Resume, node: Node, message: Message) -> list[Action]:
        if isinstance(message, Heartbeat):
            return [Send(node, Heartbeat())]
        resume.take(node, message, self.now)
        return self._take_over_if(resume.complete)

    def _tick_resume(self, resume: Resume, now: float) -> list[Action]:
        assert self._began is not None
        if not resume.back and now - self._began > self.start_seconds:
            return self._ending.abort(
                f"no process of the job has come back to the scheduler within {now - self._began:.0f} s"
            )
        return self._take_over_if(now >= resume.due)

    def _take_over_if(self, complete: bool) -> list[Action]:
        """Take over from the lost scheduler. `complete`: whether all expected processes have come back; without it,
        nothing happens."""
        if not complete:
            return []
        resume, self._resume = self._resume, None
        assert resume is not None
        self._started = True
        if why := resume.obstacle:
            return self._ending.abort(why)
        entered, roster = resume.entered, self._views.roster
        assert entered is not None
        self._first_start = resume.start
        for node in dict.fromkeys([*self._peers.expected, *resume.expected, *resume.back]):
            ended = node[0] == "worker" and node[1] in resume.finished
            self._peers[node] = Peer(resume.registration(node), self.now, ended, ended or node not in resume.back)
        missing = {node: f"{self._peers.describe(node)} {resume.absence(node)}" for node in resume.missing}
        lost = {node[1]: reason for node, reason in missing.items() if node[0] == "worker"}
        workers = [index for role, index in resume.back if role == "worker"]
        changed = self._views.resume(entered, resume.finished, lost, (*resume.ready, Ready())[0], workers)
        back = f"incarnation {self.incarnation} of the scheduler goes on after view {entered.view.number}"
        actions: list[Action] = [Log(back), *(Log(f"{reason}; the job goes on without it") for reason in lost.values())]
        for node, rejoin in resume.back.items():
            if roster.is_removed(node):
                text = f"{self._peers.describe(node)} was lost before"
                actions += self._losses.disconnect(node, text, "removed from the job")
            elif rejoin.entered != (entered,) and not self._peers[node].left:
                actions.append(Send(node, entered))
        if roster.over:
            return [*actions, *self._ending.end()]
        if roster.too_few:
            return [*actions, *self._ending.abort("; ".join([*lost.values(), roster.too_few]), better=True)]
        actions += changed
        for node, reason in missing.items():
            if node[0] == "server" and not self._ending.finished:
                actions += self._losses.remove_server(node, reason, is_here=False)
        # A process that is refused here gets no answer now. It connects again, and gets the answer then.
        for node, message in resume.held:
            following = self.handle(node, message, self.now)
            actions += [action for action in following if not isinstance(action, Refuse)]
        return actions

    def _rejoin_late(self, node: Node, message: Rejoin) -> list[Action]:
        """A process comes back whose connection to this scheduler was lost, or that is too late after a change of
        schedulers. It was removed, or will be when this scheduler notices the end of its connection. Only a worker that
        has finished, or left on purpose, is accepted: the job did not wait for it."""
        roster = self._views.roster
        if roster.entered and roster.has_left(node):
            self._peers[node] = Peer(message.registration, self.now)
            knows = any(node[1] not in enter.view.members for enter in message.entered)
            return [] if knows else [Send(node, roster.entered)]
        if node[0] == "worker" and node[1] in roster.finished:  # servers have said so, and nobody waits for it
            self._peers[node] = Peer(message.registration, self.now, done=True, left=True)
            return []
        return [Refuse(f"removed from the job: {name_of(node)} had lost its connection to {self.place}")]

    # -- registration, barriers, the end --------------------------------------------------------------------------

    def _ready(self, member: int, message: Ready) -> list[Action]:
        node, roster = ("worker", member), self._views.roster
        if roster.is_joining(node) and roster.view is None:
            self._early[member] = message
            return []
        if roster.is_joining(node) and (found := differences(self._views.facts, message.facts)):
            text = f"{self._peers.describe(node)} is not like the job's other workers: {found}"
            return self._losses.drop_newcomer(node, text)
        ranks = self.num_workers if roster.view is None else self._peers.ranks
        actions = self._views.ready(member, message, self._peers.hosts(ranks))
        while self._early and roster.view:
            rank, early = self._early.popitem()
            actions += self._ready(rank, early) if roster.is_joining(("worker", rank)) else []
        return actions

    def _register(self, node: Node, message: Register) -> list[Action]:
        is_new = self._peers.may_come_later(node) and node not in self._peers
        if node not in self._peers.expected and not self._peers.may_come_later(node):
            return [
                Refuse(
                    f"{name_of(node)} is not part of this job of {self.num_workers} workers "
                    f"and {self.num_servers} servers"
                )
            ]
        before, roster = self._peers.get(node), self._views.roster
        is_free = roster.is_removed(node) or (roster.has_left(node) and bool(before and before.left))
        if is_new or (is_free and before):
            return self._accept_newcomer(node, message, "to join" if is_new else "as a replacement")
        if node in self._peers:
            host_name = self._peers[node].registration.host_name
            return [Refuse(f"{name_of(node)} is already registered, from host {host_name}")]
        self._peers[node] = Peer(message, self.now)
        if self._peers.missing:
            return []
        self._started, self._first_start = True, self._peers.start(self.facts)
        return [
            Send(ALL, self._first_start),
            Log(f"all registered: {self.num_workers} workers, {self.num_servers} servers"),
        ]

    def _accept_newcomer(self, node: Node, message: Register, how: str) -> list[Action]:
        """Accept a process in addition to those of the start, or as a replacement. The job may not have begun yet."""
        self._peers[node] = Peer(message, self.now)
        roster, changed = self._views.roster, list[Action]()
        if node[0] == "worker":
            roster.newcomer_registered(node[1])
        else:
            changed = self._views.server_registered(node[1], self._peers.address(node[1]))
        new = roster.server_losses.new
        start = self._first_start and replace(self._first_start, lost=roster.lost_servers, new_servers=new)
        sends = [Send(node, start)] if start else []  # else it comes for all
        return self._losses.unless_stuck([*sends, Log(f"{self._peers.describe(node)} has come {how}"), *changed])

    def _barrier(self, node: Node, message: Barrier) -> list[Action]:
        if message.view:
            return self._views.barrier(node[1], message) or self._unless_hanging(self._views.why_hanging, [])
        barrier = self._barriers.reach(message.id, node[1], self.now)
        released = [] if barrier.missing else self._after_step.met(barrier.name)
        return self._unless_hanging(self._barriers.why_hanging(self._peers.finished), released)

    def _unless_hanging(self, why: str, actions: Sequence[Action]) -> list[Action]:
        """`actions`, or the end of the job if a barrier can never be complete: that is a fault of the program."""
        return self._ending.abort(why) if why else [*actions]

    def _bye(self, node: Node, message: Bye) -> list[Action]:
        roster, is_worker = self._views.roster, node[0] == "worker"
        self._peers[node].done, self._peers[node].left = True, not message.stays
        if roster.has_left(node):
            self._ending.links.forget(node)
            return []
        if roster.is_joining(node):
            return self._losses.drop_newcomer(node, f"{self._peers.describe(node)} has left")
        if is_worker and roster.view:
            self._ending.links.forget(node)
            changed = self._losses.unless_stuck(self._views.member_finished(node[1], message.done))
            changed += self._unless_hanging(self._views.why_hanging, [])
            return changed if roster.present or self._ending.finished else self._losses.end_all()
        if is_worker and (why := self._barriers.why_hanging([node[1]])):
            return self._ending.abort(why)
        actions = self._after_step.left() if is_worker else []
        if len(self._peers.finished) < self.num_workers:
            stays = [Log(f"{name_of(node)} has finished, and still sums for its host")] if message.stays else []
            return [*actions, *stays]
        return [*actions, *self._ending.end()]


def _aborted(core: SchedulerCore, node: Node, message: Abort) -> list[Action]:
    """A process ends the job, or, before it has joined, only itself."""
    reason = f"{core._peers.describe(node)}: {message.reason}"
    if core._views.roster.is_joining(node):
        return core._losses.drop_newcomer(node, reason)
    return core._ending.abort(reason, better=core._ending.causes.concern(node))


def _leaving(core: SchedulerCore, node: Node, message: Leaving) -> list[Action]:
    changed = core._views.notice(node[1], message)
    if changed is None:
        return []
    text = f"{core._peers.describe(node)} leaves on purpose: {message.reason}"
    return [Log(text, Leaves(node[1], message.reason)), *changed]


def _took(core: SchedulerCore, node: Node, message: Took) -> list[Action]:
    workers = core._views.roster.present if core.elastic else range(core.num_workers)
    return core._step_times.take(node[1], message.seconds, workers)


def _link_lost(core: SchedulerCore, node: Node, lost: LinkLost) -> list[Action]:
    if core._views.roster.counts(lost):
        core._ending.links.add(lost, core.now)
    return []


def _nothing(core: SchedulerCore, node: Node, message: Message) -> list[Action]:
    return []


def _change(core: SchedulerCore, node: Node, change: Change) -> list[Action]:
    """The user wants to change the job's kvstore."""
    if core.elastic:
        return core._views.change(change)
    return core._after_step.ask(change, not core._started, bool(core._peers.finished))


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
        lambda core, node, message: core._ending.abort(f"{core._peers.describe(node)}: {message.reason}"),
    ),
    LinkLost: Handler(
        ALL_ROLES,
        "waits for a better cause; then ends the job, or goes on without the process that is cut off",
        _link_lost,
    ),
    Failed: Handler(
        WORKER,
        "goes on without the worker",
        lambda core, node, message: core._losses.failed(node, message.error, message.done + 1),
        only_elastic=True,
    ),
    Ready: Handler(
        WORKER,
        "begins view 1 when all are ready; lets a newcomer join if its facts are those of the others",
        lambda core, node, message: core._ready(node[1], message),
        only_elastic=True,
    ),
    Flushed: Handler(
        WORKER,
        "begins the next view when all members have said so",
        lambda core, node, message: core._losses.unless_stuck(core._views.flushed(node[1], message)),
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
        lambda core, node, message: core._views.roster.has_state(node[1], message),
        only_elastic=True,
    ),
    Left: Handler(SERVER, "nothing: the worker says `bye`; see [Another scheduler](#another-scheduler)", _nothing),
    Change: Handler(AGENT[:1], "asks the workers, or the leader, when it can come", _change, of_registered=False),
    Stops: Handler(
        WORKER,
        "names the step when all have answered",
        lambda core, node, message: core._after_step.stops(node[1], message),
    ),
    Changed: Handler(
        SERVER,
        "logs the change when all have made it, and lets the workers go on",
        lambda core, node, message: core._after_step.changed(node[1], message),
    ),
    Took: Handler(WORKER, "logs who computes longer than the median", _took),
}
