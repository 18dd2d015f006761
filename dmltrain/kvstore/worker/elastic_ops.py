"""The operations of a store in an elastic job: they are ops of views (view.py), which changes interrupt.

Before `start` the store works like any other one. After `start` each round of training, barrier and all_reduce is one
op. An op raises ViewChanged if a change of view interrupts it. Then `repeat` enters the view and runs its block again;
the optimizer does the same with its round.

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
get the states of their slices in the first op of the view (server_steps). Each worker connects to new servers when
it enters the view. If it cannot, the scheduler decides which process is cut off, and another view follows.

If the optimizer runs on the servers, the kvstore can change with a view, between dist_sync and the other types. In the
view before that one the members complete the steps that they are making, and wait
(scheduler/membership/kind_change.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.errors import Diverged, JobLost, Unreadable, UserError
from dmltrain.kvstore.base import READ, Handle, ViewChanged
from dmltrain.kvstore.ops import Ops
from dmltrain.kvstore.transport.message.base import MAX_TEXT
from dmltrain.kvstore.transport.message.views import Ready
from dmltrain.kvstore.view import EQUAL, Balancing, View
from dmltrain.kvstore.worker.broadcast import Broadcast
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.entering.executor import ViewEntry
from dmltrain.kvstore.worker.entering.training import Training
from dmltrain.kvstore.worker.entering.views import EnteredViews
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.present_kind import PresentKind
from dmltrain.kvstore.worker.server_steps.steps import ServerSteps
from dmltrain.kvstore.worker.transfers import Transfers

T = TypeVar("T")
ERROR_LETTERS = 300  # at most, of an error that the others are told


class ElasticOps(Ops):
    """`repeating`: whether `repeat` runs a block. `steps`: those that the servers make. `entry` has the
    program that trains."""

    def __init__(
        self,
        environment: Environment,
        member: ElasticMembership,
        entries: KeyEntries,
        transfers: Transfers,
        broadcast: Broadcast,
        kind: PresentKind,
    ) -> None:
        self._number = environment.index
        self._member, self._progress = member, member.progress
        self._entries, self._transfers, self._kind = entries, transfers, kind
        self.repeating = False
        self.steps = ServerSteps(member, entries)
        sum_up = transfers.all_reduce
        self.entry = ViewEntry(environment, member, entries, self.steps, broadcast, sum_up, lambda: self.complete())
        self.views = EnteredViews(self._number, member, entries, transfers, broadcast, kind, self.steps, self.entry)

    @property
    def is_alone(self) -> bool:  # type: ignore[override]
        return self.entry.state.is_alone

    @property
    def view(self) -> View | None:  # type: ignore[override]
        """The view that this worker has entered; None before `start`."""
        return self._progress.view

    @property
    def done(self) -> int:
        """The last op that this worker holds."""
        return self._progress.done

    @property
    def clock(self) -> int:
        """How many steps of its own this worker holds."""
        return self.steps.made

    @property
    def keeps_residuals(self) -> bool:
        """Whether the gradient compression keeps residuals."""
        return self._entries.has_residuals

    # -- the job --------------------------------------------------------------------------------------------------

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
        self.entry.training = training
        self._member.flush()
        why_fixed = (self._kind.why_fixed() or why_fixed)[:MAX_TEXT]
        now = self._kind.now
        self._member.start(Ready(facts, replay, balance, now.type.name, now.chosen, why_fixed))
        self.enter()

    def admit(self) -> None:
        """The next op is a round of training: let a change that waits come before it. Raises JobLost."""
        if self._progress.invited:
            self._member.admit()

    def report_speed(self, view: View, samples: float) -> None:
        """How many samples of its parts in this view the worker computes per second, without waits for others."""
        self._member.speed(view, samples)

    def wait_for_change(self) -> None:
        """Between two steps: if the kvstore changes after the last one, wait for the next view, and enter it. Raises
        JobLost, MembershipEnded, Stopped."""
        if self.view and self.view.drains and self.done == self.view.until:
            self._progress.wait_for_view()
            self.repeat(self.begin)

    def go_if_out(self) -> None:
        """Between two ops: if the newest view is without this worker, enter all views up to it. Raises JobLost,
        MembershipEnded, Stopped."""
        if self._member.is_out:
            self.repeat(self.begin)

    def drops_out(self, error: BaseException) -> bool:
        """A mistake of the user, or weights that differ between workers, ends the job: all workers would fail."""
        if not self.view or isinstance(error, (UserError, Diverged)):
            return False
        if not self._progress.finished:
            own = _own(error)
            if own and (reason := self.entry.training.blamed(own)):
                self._member.abort(reason)
            else:
                self._member.drop_out(own)
        return True

    # -- ops ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.view:
            self._progress.begin()

    @property
    def op(self) -> int:  # type: ignore[override]
        return (self.clock if self._kind.own else self.done) + 1

    def begin_step(self) -> None:
        self.begin()
        self._transfers.begin(self.op)

    def begin_round(self) -> None:
        self.begin()
        self._transfers.begin(self.done + 1)

    def sum_in_round(self, name: str, values: Array) -> Handle:
        """As a part of a round: the handle's value will be the sum of all members' `values`, float64 (n,)."""
        self.begin_round()
        self._transfers.declare_sum(name, values)
        return self._transfers.pushpull(name, values, READ, 0, -1.0)

    def run(self, what: str, run: Callable[[], None], has_barrier: bool = True) -> None:
        """Run one op. It must be inside of `repeat`: else, when the view changes, the others would repeat their op and
        wait in vain for this worker. It ends with a barrier: no member may hold the op before all have its result,
        because a server could be lost before it has sent that to the rest."""
        if not self.view:
            return run()
        if not self.repeating:
            raise RuntimeError(f"{what} of an elastic job must be inside of KVStore.repeat")
        self.begin()
        run()
        if not has_barrier:
            self._member.barrier()
        self.complete()

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

    def complete(self) -> None:
        self._progress.complete()

    def enter(self) -> bool:
        return self.views.enter()

    # -- the optimizer on the servers -----------------------------------------------------------------------------

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        self.steps.spec = spec

    def stepped(self) -> None:
        """The servers' optimizer has made a step, with a round that was recognised or a step of this worker's own."""
        assert self.view is not None
        self.steps.stepped(self.view, self._number)
        self._kind.step_made()

    def rest(self, clock: int) -> None:
        """Tell the servers that this worker makes no step up to `clock`, so that no pull waits for it. Raises
        ViewChanged, JobLost."""
        self.begin()
        self.steps.skip_to(clock)
        self.steps.hold()


def _own(error: BaseException) -> str:
    """The text about an error of this worker itself; empty if other processes, or a signal, have ended it."""
    if not isinstance(error, Exception) or (isinstance(error, JobLost) and not isinstance(error, Unreadable)):
        return ""
    text = str(error.__cause__) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
    return text[:ERROR_LETTERS]
