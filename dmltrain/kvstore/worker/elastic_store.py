"""The distributed kvstore of an elastic job: its operations are ops of views (view.py), which changes interrupt.

Before `start` it works like any other kvstore. After `start` each round of training, barrier and all_reduce is one op.
An op raises ViewChanged if a change of view interrupts it. Then `repeat` enters the view and runs its block again; the
optimizer does the same with its round.

A replacement of a lost worker prepares itself without the others. Until it is a member, a sum is its own value, and it
only remembers its keys. A view with new members begins with an additional op, in which these get the state of training.
A view with members that are behind begins in the same way: these could not complete a round, because a server was lost
that had its results, and they get the weights and the optimizer's state. Any op but a round ends with a barrier: so if
one member holds it, all have its results.

With dist_async and dist_ssp each worker makes steps of its own, which are no ops. A view may begin while a worker is in
the middle of a step. The worker then pushes this step again; servers ignore what they have of it already. In the first
op of each view all members learn how many steps each of them holds (clocks.py). Then the samples that are left are
assigned again.

If the next view has other servers, all members divide the slices of keys among these, and declare the keys again. If
the optimizer runs on the workers, servers keep no state from one round to the next. If it runs on the servers, these
get the states of their slices in the first op of the view (server_steps.py). Each worker connects to new servers when
it enters the view. If it cannot, the scheduler decides which process is cut off, and another view follows.

If the optimizer runs on the servers, the kvstore can change with a view, between dist_sync and the other types. In the
view before that one the members complete the steps that they are making, and wait
(scheduler/membership/kind_change.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.errors import Diverged, JobLost, Unreadable, UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.base import (
    READ,
    Handle,
    Key,
    Keys,
    MembershipEnded,
    Stopped,
    ViewChanged,
    keys_and_values,
    summed,
)
from dmltrain.kvstore.kind import kind_of
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.client import EXIT_SECONDS
from dmltrain.kvstore.transport.message import MAX_TEXT, Change, Ready
from dmltrain.kvstore.types import KVStoreType
from dmltrain.kvstore.view import EQUAL, Balancing, View
from dmltrain.kvstore.worker import changes, clocks
from dmltrain.kvstore.worker.changes import UNKNOWN
from dmltrain.kvstore.worker.clocks import Clocks
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.links.routes import Sharing
from dmltrain.kvstore.worker.residual import ResidualHandover
from dmltrain.kvstore.worker.server_steps import ServerSteps
from dmltrain.kvstore.worker.store import DistKVStore

T = TypeVar("T")
ERROR_LETTERS = 300  # at most, of an error that the others are told
CHUNK = 1 << 16  # bytes of a broadcast in one op; each byte takes 8 on the wire
ON_WORKERS = (
    "the workers run the optimizer, and each step is one of all of them: start the job with --update-on-kvstore 1, or "
    "with another --kv-store"
)
STEP, ALL = 1, 2  # what a worker lacks: weights and optimizer's state after a round; the whole state of training


class ElasticKVStore(DistKVStore):
    """`rank` and `num_workers` are this worker's place in its view, and the number of its members."""

    elastic = True
    keeps_gradients = True
    sharing = False  # whether `give_state` collects the state for other workers, and not for a checkpoint
    sums_in_host = False  # a host's relay would be one more process that can be lost
    flat_keys = False

    def __init__(
        self, kind: str, staleness: float, environment: Environment, exit_seconds: float = EXIT_SECONDS
    ) -> None:
        self.is_alone = environment.joins  # a replacement that is not a member yet
        self._lacks = ALL if environment.joins else 0
        self._undeclared = environment.joins  # whether the servers of the view may not know the keys
        self._servers = tuple(range(environment.num_servers))  # among which the slices of keys are divided
        self._sharing_state = False  # whether the next op must send the state of training to members that lack it
        self._restoring = False  # whether servers need the optimizer's state of their slices
        self._unsettled = False  # whether some members may not know yet how many steps each one holds
        self._start = 0  # the clock from which all members go on once they know it
        self._holding = False  # whether this worker still has to tell the servers which step it holds in this view
        self.give_state: Callable[[], bytes] = lambda: b""
        self.take_state: Callable[[bytes], None] = lambda content: None
        self.take_step: Callable[[bytes], None] = lambda content: None  # of the state only what a step changes
        self.blamed: Callable[[str], str] = lambda error: ""  # this worker's error -> why it ends the job, if it does
        self.on_shared: Callable[[], None] = lambda: None  # called when all members have the state of training
        self.begun: Callable[[], bool] = lambda: False  # whether this worker is in the middle of a step of its own
        self.between_epochs: Callable[[], bool] = lambda: False  # whether this worker begins an epoch next
        self.take_weights: Callable[[], None] = lambda: None  # those that the servers have now
        self.on_clocks: Callable[[Clocks], None] = lambda clocks: None  # before the state is given to new members
        self.repeating = False  # whether `repeat` runs a block
        self._stopped = False  # whether `enter` has raised Stopped
        self._farewell = "the replay has no later view with this worker"
        self._notice = ""  # why this worker leaves on purpose, if it does
        self.pushed = 0.0  # when the last push of a round was handed over, s of time.perf_counter
        # Called when this worker is in a new view; `missed`: others have completed its round.
        self.on_enter: Callable[[View, bool], None] = lambda view, missed: None
        super().__init__(kind, staleness, environment, exit_seconds)
        self._handing_over = ResidualHandover(environment.index, self._entries, self._broadcast)
        self._on_servers = ServerSteps(self._member, self._entries, environment.wait_seconds, self._own)
        self._refusal: Callable[[KVStoreType], str] = lambda kind: UNKNOWN  # why the optimizer cannot have this type

    def _join(self, environment: Environment, sharing: Sharing, exit_seconds: float) -> ElasticMembership:
        self._elastic = ElasticMembership(environment, sharing, exit_seconds)
        self._progress = self._elastic.progress
        return self._elastic

    @property
    def _own(self) -> bool:
        """Whether each worker makes steps of its own."""
        return not self.kvstore_type.synchronous

    @property
    def member(self) -> int:
        return self._environment.index

    @property
    def view(self) -> View | None:
        """The view that this worker has entered; None before `start`."""
        return self._progress.view

    @property
    def keeps_residuals(self) -> bool:
        """Whether the gradient compression keeps residuals."""
        return self._entries.has_residuals

    @property
    def done(self) -> int:
        """The last op that this worker holds."""
        return self._progress.done

    @property
    def clock(self) -> int:
        """How many steps of its own this worker holds."""
        return self._on_servers.made

    def members(self, ranks: Sequence[int]) -> list[int]:
        return [self.view.members[rank] for rank in ranks] if self.view else list(ranks)

    # -- views ----------------------------------------------------------------------------------------------------

    def start(
        self, facts: Mapping[str, Any], replay: tuple[View, ...] = (), balance: Balancing = EQUAL, why_fixed: str = ""
    ) -> None:
        """All keys are declared: the job goes on without workers that are lost from now on. `facts`: what a replacement
        must have in common with the others. `replay`: the views to go through, on worker 0. `balance`: how samples
        follow the speeds that are reported. `why_fixed`: why members cannot change between steps that all make together
        and steps of their own. Waits for all workers, or until this one is admitted. Raises JobLost,
        MembershipEnded."""
        self._member.flush()
        why_fixed = (self._why_fixed() or why_fixed)[:MAX_TEXT]
        self._elastic.start(Ready(facts, replay, balance, self.kvstore_type.name, self._kind.chosen, why_fixed))
        self.enter()

    def _why_fixed(self) -> str:
        """Why this store cannot change between such types; empty if it can."""
        if not self._stepping:
            return ON_WORKERS
        others = [type_ for type_ in types.TABLE if type_.can_be_elastic and type_.synchronous == self._own]
        for other in others:
            change = Change(0, other.name, -1.0, "")
            if why := changes.refusal(self._kind, change, self._entries.compresses, relays=False):
                return why
            if why := self._refusal(other):
                return why
        return ""

    def follow_changes(self, keys: Sequence[Key], refusal: Callable[[KVStoreType], str]) -> None:
        self._refusal = refusal

    def admit(self) -> None:
        """The next op is a round of training: let a change that waits come before it. Raises JobLost."""
        if self._progress.invited:
            self._elastic.admit()

    def report_speed(self, view: View, samples: float) -> None:
        """How many samples of its parts in this view the worker computes per second, without waits for others."""
        self._elastic.speed(view, samples)

    def wait_for_change(self) -> None:
        """Between two steps: if the kvstore changes after the last one, wait for the next view, and enter it. Raises
        JobLost, MembershipEnded, Stopped."""
        if self.view and self.view.drains and self.done == self.view.until:
            self._progress.wait_for_view()
            self.repeat(self._begin)

    def wait_to_return(self) -> None:
        """After MembershipEnded: wait for a later view of the replay with this worker, and enter it. Raises JobLost,
        and MembershipEnded if there is none."""
        if not (self._progress.returns or self._progress.pending):
            raise MembershipEnded(self._farewell)
        self._lacks = ALL
        self._progress.wait_for_view()
        self.enter()

    def confirm(self) -> None:
        self._elastic.confirm()

    def repeat(self, block: Callable[[], T]) -> T:
        while True:
            outer, self.repeating = self.repeating, True
            try:
                return block()
            except ViewChanged:
                if outer:
                    raise
                self.enter()
            finally:
                self.repeating = outer

    def leave(self, reason: str) -> None:
        """Ask the scheduler to let this worker leave on purpose, before one of its next rounds; then `enter` raises
        MembershipEnded. For any thread. Before `start` this has no effect."""
        self._notice = reason
        self._elastic.leave(reason, self.keeps_residuals)

    def enter(self) -> bool:
        """See KVStore.enter. Also raises Stopped, once, when the job ends because it has too few workers."""
        completed = False
        while True:
            with contextlib.suppress(ViewChanged):
                completed = self._enter_next() or completed
                if self._routes.unreachable:
                    self._elastic.wait_for_others(self._routes.unreachable)
                    self._progress.begin()
                if self._undeclared and not self.is_alone:
                    self._declare_again()
                if self._holding and not self._lacks:
                    self._hold()
                if self._sharing_state:
                    self._share_state()
                self._progress.wait_if_held()
                if self._unsettled:
                    self._settle()
                break
        if self._progress.ends and not self._stopped:
            self._stopped = True
            raise Stopped(f"the job ends: {self._progress.ends}")
        return completed

    def _enter_next(self) -> bool:
        """Returns whether others have completed the round of this worker."""
        view = self._progress.enter()
        is_member = self.member in view.members
        self._routes.enter(view, connects=is_member and self._progress.pending is None)
        # Also for a worker that is not in the view: its LEAVE must not wait for earlier answers.
        self._transfers.enter(view.number, self.clock if self._own else view.base)
        if self._progress.has_departed:  # it may have left with an earlier view, about which it was not told
            self._farewell = f"it leaves the job on purpose ({self._notice})"
        if not is_member:
            raise MembershipEnded(f"view {view.number} is without worker {self.member}")
        self._take_kind(view)
        self._broadcast.restart()
        self.rank, self.num_workers = view.place(self.member), len(view.members)
        self._states.enter(self.rank, self.num_workers)
        if self.member in view.joined:
            for undo in self._entries.undos:
                undo.forget()
        self._sharing_state = self._sharing_state or view.shares_state
        missed = view.number in self._progress.missed
        self._lacks = max(self._lacks, STEP if missed else 0)
        self.on_enter(view, missed)
        others = self._servers != view.servers or bool(view.joined_servers)
        if self._stepping:
            self._holding = view.number > 1  # in the first view no step was made yet
            self._on_servers.enter(set(self._servers).difference(view.servers) | set(view.joined_servers))
            self._restoring = self._restoring or (others and not self.is_alone)
            self._sharing_state = self._sharing_state or self._restoring or (self._own and view.number > 1)
        if others or self.is_alone:
            self._servers = view.servers
            self._entries.place(view.servers)
        self._undeclared = self._undeclared or others
        return missed

    def _take_kind(self, view: View) -> None:
        """Change to the kind of kvstore that this view has. Its servers have changed already."""
        before, now = self._kind, kind_of(view)
        if not now or now == before:
            return
        self._become(now)
        if now.type.synchronous != before.type.synchronous:
            self._transfers.change(now.type.synchronous)
            self._on_servers.change(self._own)
        log(f"from view {view.number} on: {now} (before: {before})")

    def _declare_again(self) -> None:
        self._entries.declare_again()
        self._member.flush()
        self._undeclared = False

    def _hold(self) -> None:
        self._on_servers.hold()
        self._holding = False

    def _share_state(self) -> None:
        """One op with several exchanges. The first member that has the state of training sends it to the members that
        lack it, and to servers that lack it; members that leave hand over their residuals. All barriers of the op have
        the same name, which is safe, because each is released before the next one is reached. Raises ViewChanged: then
        the next view begins with this op."""
        self._begin()
        view = self.view
        assert view is not None
        table = np.zeros((3, self.num_workers))
        table[:, self.rank] = self._lacks, self._on_servers.made, self._restoring
        lacking, steps, restoring = super().all_reduce("who lacks the state", table)
        # The others have declared the keys before. So if this worker's differ, the servers refuse these, and not
        # theirs.
        if self.is_alone:
            self._declare_again()
            self.is_alone = False
        if lacking.all():
            reason = "all workers that had the state of training were lost: start the job again"
            self.abort(reason)
            raise JobLost(reason)
        source = int(np.argmin(lacking))
        held = self._tell_clocks(source) if self._own else None
        if held:
            source = view.place(held.freshest)
        elif self._lacks and self._holding:
            self._on_servers.made = int(steps[source])
            self._hold()
        if restoring.any():
            self._restore(source)
        content = self._shared_state(source) if lacking.any() else b""
        residuals = self._handing_over.exchange(view)
        self._member.barrier()  # after it all members that lacked the state have it
        self.complete()
        self._handing_over.settle(view, residuals)
        self._sharing_state = self._restoring = False
        self._unsettled = self._own
        self._on_servers.restored()
        lacked, self._lacks = self._lacks, 0
        if lacked:
            (self.take_state if lacked == ALL else self.take_step)(content)
            self._elastic.has_state(view)
        self.on_shared()

    def _settle(self) -> None:
        """Wait until all members hold the op of `_tell_clocks`. Without that, a member of the next view might not know
        what the clock means that this worker now tells the servers. All members go on from the same clock, except those
        in the middle of a step, which they complete first."""
        self._begin()
        self._member.barrier()
        self.complete()
        if not self.begun() or self._progress.ends:
            self._on_servers.skip_to(self._start)
            self._on_servers.hold()
        self._unsettled = False

    def _tell_clocks(self, source: int) -> Clocks:
        """How many steps each member holds. The worker with rank `source` asks the servers about members that have
        left."""
        table = clocks.table_of(self._environment.ranks)
        if not self._lacks:
            since = time.monotonic() - self._on_servers.pulled
            clocks.add_own(table, self.member, self.clock, self.begun(), since)
        if self.rank == source:
            clocks.add_gone(table, self._on_servers.gone())
        held = clocks.read(super().all_reduce("how many steps all hold", table))
        if not self._lacks:
            self.on_clocks(held)
        self._start = held.start
        return held

    def _shared_state(self, source: int) -> bytes:
        """The state of training of the worker with rank `source`; empty if this worker does not lack it."""
        self.sharing = True
        content = self.give_state() if self.rank == source else b""
        self.sharing = False
        size = super().all_reduce("size of the state", np.array([float(len(content))]))
        values = np.frombuffer(content, np.uint8) if self.rank == source else np.zeros(int(size[0]), np.uint8)
        self._broadcast(values, bool(self._lacks), self.members([source])[0])
        return values.tobytes() if self._lacks else b""

    def _restore(self, source: int) -> None:
        """The worker with rank `source` sends the servers the states of their slices."""
        own = self._on_servers.own_snapshots()
        sizes = np.zeros(self.num_workers)
        sizes[self.rank] = len(own)
        sizes = super().all_reduce("sizes of snapshots", sizes)
        snapshots = []
        for place in np.flatnonzero(sizes).tolist():
            values = np.frombuffer(own, np.uint8) if place == self.rank else np.zeros(int(sizes[place]), np.uint8)
            self._broadcast(values, self.rank == source, self.members([place])[0])
            snapshots.append(values.tobytes())
        if self.rank == source:
            for text in self._on_servers.restore(snapshots):
                log(text)

    def complete(self) -> None:
        self._progress.complete()

    def _begin(self) -> None:
        if self.view:
            self._progress.begin()

    # -- the optimizer on the servers -----------------------------------------------------------------------------

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        self._on_servers.spec = spec
        if self.is_alone:  # the servers run the optimizer already
            self._stepping = True
        else:
            super().set_optimizer(spec)

    def keep_snapshots(self, weights: Callable[[], Mapping[Key, Array]]) -> None:
        """`weights()` returns this worker's weights by key, flat. Servers that lack weights get these."""
        self._on_servers.weights = weights

    def snapshot_every(self, seconds: float) -> None:
        """How often the servers' states of the optimizer are copied into the memory of workers."""
        self._on_servers.every = seconds

    def sum_in_round(self, name: str, values: Array) -> Handle:
        """As a part of a round: the handle's value will be the sum of all members' `values`, float64 (n,)."""
        self._begin()
        self._transfers.begin(self.done + 1)
        self._transfers.declare_sum(name, values)
        return super().pushpull(name, values, READ, wait=False)

    def stepped(self) -> None:
        """The servers' optimizer has made a step, with a round that was recognised or a step of this worker's own."""
        assert self.view is not None
        now = time.monotonic()
        self._on_servers.made += 1
        self._on_servers.pulled = now
        self._on_servers.keep(self.view, self.member, now)
        self._report_step()

    def refreshed(self) -> None:
        """This worker has the servers' present weights."""
        self._on_servers.pulled = time.monotonic()

    def skip_to(self, clock: int) -> None:
        """The next own step of this worker has the number `clock` + 1, as for all members that go on from there."""
        self._on_servers.skip_to(clock)

    def rest(self, clock: int) -> None:
        """Tell the servers that this worker makes no step up to `clock`, so that no pull waits for it. Raises
        ViewChanged, JobLost."""
        self._begin()
        self._on_servers.skip_to(clock)
        self._on_servers.hold()

    # -- ops ------------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any, whole: bool = False, mean: bool = False) -> None:
        if self.view:
            raise UserError("kvstore: an elastic job declares all keys before its first step")
        if self.is_alone:
            keys, values = keys_and_values(key, value)
            self._entries.declare(keys, [summed(value) for value in values], True, whole, mean, tell=False)
        else:
            super().init(key, value, whole, mean)

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        self._begin()
        self._transfers.begin((self.clock if self._own else self.done) + 1)
        super().push(key, value, priority, rate)
        self.pushed = time.perf_counter()

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        if self.is_alone:  # its values will come with the state of training
            return Handle(0, "pull", 0.0)
        self._begin()
        return super().pull(key, out, priority, wait)

    def pushpull(
        self, key: Keys, value: Any, out: Any = None, priority: int = 0, wait: bool = True, rate: float = -1.0
    ) -> Handle:
        self._begin()
        self._transfers.begin(self.done + 1)
        handle = super().pushpull(key, value, out, priority, wait, rate)
        self.pushed = time.perf_counter()
        return handle

    def barrier(self) -> None:
        if not self.is_alone:
            self._op("a barrier", super().barrier)

    def all_reduce(self, name: str, array: Array) -> Array:
        if self.is_alone:
            return np.array(array, np.float64)
        return self._op(f"the sum of {name}", lambda: self._sum(name, array))

    def _sum(self, name: str, array: Array) -> Array:
        """The barrier after the sum: no member may hold the op before all have the sum, because a server could be lost
        before it has sent the sum to the rest."""
        total = super().all_reduce(name, array)
        if self.view:
            self._member.barrier()
        return total

    def _op(self, what: str, run: Callable[[], T]) -> T:
        """Run one op. It must be inside of `repeat`: else, when the view changes, the others would repeat their op and
        wait in vain for this worker."""
        if not self.view:
            return run()
        if not self.repeating:
            raise RuntimeError(f"{what} of an elastic job must be inside of KVStore.repeat")
        self._begin()
        result = run()
        self.complete()
        return result

    def broadcast(self, values: Array, needed: bool = True, source: int = 0) -> None:
        """An op for each chunk: the sum of worker `source`'s bytes and zeros."""
        if not self.view:
            if not self.is_alone:
                super().broadcast(values, needed, source)
            return
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            own = part if self.rank == source else np.zeros_like(part)
            total = self.all_reduce("bytes of one worker", own)
            if needed:
                part[:] = total.astype(np.uint8)

    def measure_limits(self) -> str:
        """Nothing is measured: bounds would be about the links at the start, and links change with views."""
        return ""

    # -- the end --------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """A mistake of the user, or weights that differ between workers, ends the job: all workers would fail."""
        if not self.view or isinstance(error, (UserError, Diverged)):
            super().failed(error)
        elif not self._progress.finished:
            own = _own(error)
            if own and (reason := self.blamed(own)):
                self.abort(reason)
            else:
                self._member.drop_out(own)


def _own(error: BaseException) -> str:
    """The text about an error of this worker itself; empty if other processes, or a signal, have ended it."""
    if not isinstance(error, Exception) or (isinstance(error, JobLost) and not isinstance(error, Unreadable)):
        return ""
    text = str(error.__cause__) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
    return text[:ERROR_LETTERS]
