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

What a worker does when a view begins is a plan (entering/plan.py).

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
from dmltrain.kvstore.transport.message import MAX_TEXT, Ready
from dmltrain.kvstore.types import KVStoreType
from dmltrain.kvstore.view import EQUAL, Balancing, View
from dmltrain.kvstore.worker import changes
from dmltrain.kvstore.worker.changes import UNKNOWN
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.entering.executor import ViewEntry
from dmltrain.kvstore.worker.entering.plan import NewView, returning
from dmltrain.kvstore.worker.entering.training import Training
from dmltrain.kvstore.worker.links.routes import Sharing
from dmltrain.kvstore.worker.server_steps import ServerSteps
from dmltrain.kvstore.worker.store import DistKVStore

T = TypeVar("T")
ERROR_LETTERS = 300  # at most, of an error that the others are told
CHUNK = 1 << 16  # bytes of a broadcast in one op; each byte takes 8 on the wire
ON_WORKERS = (
    "the workers run the optimizer, and each step is one of all of them: start the job with --update-on-kvstore 1, or "
    "with another --kv-store"
)


class ElasticKVStore(DistKVStore):
    """`rank` and `num_workers` are this worker's place in its view, and the number of its members."""

    elastic = True
    keeps_gradients = True
    sums_in_host = False  # a host's relay would be one more process that can be lost
    flat_keys = False

    def __init__(
        self, kind: str, staleness: float, environment: Environment, exit_seconds: float = EXIT_SECONDS
    ) -> None:
        self.repeating = False  # whether `repeat` runs a block
        self._stopped = False  # whether `enter` has raised Stopped
        self._farewell = "the replay has no later view with this worker"
        self._notice = ""  # why this worker leaves on purpose, if it does
        self.pushed = 0.0  # when the last push of a round was handed over, s of time.perf_counter
        super().__init__(kind, staleness, environment, exit_seconds)
        self._on_servers = ServerSteps(self._member, self._entries, environment.wait_seconds, self._own)
        self._entry = ViewEntry(
            environment,
            self._elastic,
            self._entries,
            self._on_servers,
            self._broadcast,
            self._transfers.all_reduce,
            lambda: self.complete(),
        )
        self._refusal: Callable[[KVStoreType], str] = lambda kind: UNKNOWN  # why the optimizer cannot have this type

    def _join(self, environment: Environment, sharing: Sharing, exit_seconds: float) -> ElasticMembership:
        self._elastic = ElasticMembership(environment, sharing, exit_seconds)
        self._progress = self._elastic.progress
        return self._elastic

    @property
    def is_alone(self) -> bool:  # type: ignore[override]
        return self._entry.state.is_alone

    @property
    def training(self) -> Training:
        """The program that trains."""
        return self._entry.training

    @property
    def sharing(self) -> bool:
        """Whether the state of training is collected for other workers now, and not for a checkpoint."""
        return self._entry.collecting

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
        self,
        training: Training,
        facts: Mapping[str, Any],
        replay: tuple[View, ...] = (),
        balance: Balancing = EQUAL,
        why_fixed: str = "",
    ) -> None:
        """All keys are declared: the job goes on without workers that are lost from now on. `training`: this worker's.
        `facts`: what a replacement must have in common with the others. `replay`: the views to go through, on worker 0.
        `balance`: how samples follow the speeds that are reported. `why_fixed`: why members cannot change between steps
        that all make together and steps of their own. Waits for all workers, or until this one is admitted. Raises
        JobLost, MembershipEnded."""
        self._entry.training = training
        self._member.flush()
        why_fixed = (self._why_fixed() or why_fixed)[:MAX_TEXT]
        self._elastic.start(Ready(facts, replay, balance, self.kvstore_type.name, self._kind.chosen, why_fixed))
        self.enter()

    def _why_fixed(self) -> str:
        """Why this store cannot change between such types; empty if it can."""
        if not self._stepping:
            return ON_WORKERS
        others = [type_ for type_ in types.TABLE if type_.can_be_elastic and type_.synchronous == self._own]
        reasons = [changes.why_fixed(self._entries.compresses, relays=False), *map(self._refusal, others)]
        return next(filter(None, reasons), "")

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
        self._entry.state = returning(self._entry.state)
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
                new = self._begin_view()
                completed = completed or new.missed
                self._entry.run(new)
                break
        if self._progress.ends and not self._stopped:
            self._stopped = True
            raise Stopped(f"the job ends: {self._progress.ends}")
        return completed

    def _begin_view(self) -> NewView:
        """What depends on the view alone; the rest is for its plan."""
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
        missed = view.number in self._progress.missed
        self.training.entered(view, missed)
        return NewView(view, missed, self._stepping, self._own)

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

    def keep_snapshots(self, weights: Callable[[], Mapping[Key, Array]], take_weights: Callable[[], None]) -> None:
        """`weights()` returns this worker's weights by key, flat. Servers that lack weights get these. `take_weights()`
        takes those that the servers have now."""
        self._on_servers.weights, self._on_servers.take_weights = weights, take_weights

    def take_weights(self) -> None:
        """Take the weights that the servers have now. Raises ViewChanged, JobLost."""
        self._on_servers.take_weights()

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
            if own and (reason := self.training.blamed(own)):
                self.abort(reason)
            else:
                self._member.drop_out(own)


def _own(error: BaseException) -> str:
    """The text about an error of this worker itself; empty if other processes, or a signal, have ended it."""
    if not isinstance(error, Exception) or (isinstance(error, JobLost) and not isinstance(error, Unreadable)):
        return ""
    text = str(error.__cause__) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
    return text[:ERROR_LETTERS]
