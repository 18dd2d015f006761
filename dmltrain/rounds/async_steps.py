"""The part of a worker in an elastic job whose members make steps of their own (dist_async, dist_ssp): its steps of an
epoch.

Members agree on how the samples are dealt, in the first op of each view: see kvstore/worker/clocks.py and
assignment/async_assignment.py. Otherwise they meet only when all samples of the epoch are used.
"""

from __future__ import annotations

from logging import Logger
from typing import TYPE_CHECKING, Any

from dmltrain.audit import sample_checksum
from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.parts import Epoch, Part
from dmltrain.kvstore.view import Lost, View
from dmltrain.kvstore.worker.clocks import Clocks

if TYPE_CHECKING:
    from dmltrain.rounds.member import Member


class AsyncSteps:
    """The part of Member that depends on such a kvstore. `begun`: whether this worker is in the middle of a step."""

    def __init__(self, member: Member, log: Logger) -> None:
        self._member, self._log = member, log
        self.begun = False
        self._next: tuple[AsyncAssignment, Clocks] | None = None  # of this view, until all members have it
        self._failed: list[Lost] = []

    @property
    def assignment(self) -> AsyncAssignment:
        """That of the present epoch."""
        assignment = self._member.journal.assignment
        assert isinstance(assignment, AsyncAssignment)
        return assignment

    def take_clocks(self, clocks: Clocks) -> None:
        """All members have told which steps they hold: assign the samples that are left."""
        before, view = self._member.journal.assignment, self._member.view
        if before and not before.finished:
            assignment = before.after(view.members, clocks.counted, clocks.begun, clocks.start)
            if view.drains:
                assignment.hold_back()
            self._next = assignment, clocks

    def place(self) -> dict[str, Any]:
        """Where the job is, for new members."""
        assert self._next is not None  # newcomers join in the middle of an epoch
        return {**self._member.journal.state(), "dealing": self._next[0].state()}

    def state_is_shared(self) -> None:
        """All members have the state of training."""
        if self._next:
            (assignment, clocks), self._next = self._next, None
            self._log_lost(clocks)
            self._note_poison_samples(clocks)
            last = [(member, *step) for member in clocks.gone if (step := self._last_step(member, clocks))]
            self._member.journal.agreed(assignment, self._member.view, last)
        self._failed.clear()

    def _last_step(self, member: int, clocks: Clocks) -> tuple[int, Array] | None:
        """The last counted step of a member that has left, if it belongs to the present assignment."""
        steps = self.assignment.steps_between(member, self.assignment.before(member), clocks.gone[member])
        return next(reversed([*steps]), None)

    def _log_lost(self, clocks: Clocks) -> None:
        """Log what became of the last steps of members that have left."""
        for member in sorted({*self.assignment.members} - {*self._member.view.members}):
            if member not in clocks.gone:
                self._log.warning(
                    "No server knows the steps of worker %d: its samples since the last view come again", member
                )
            elif member in clocks.partly:
                self._log.warning(
                    "Some weights may have the last gradient of worker %d and others not; its samples come again",
                    member,
                )

    def _note_poison_samples(self, clocks: Clocks) -> None:
        """Remember the samples at which members have failed."""
        for lost in self._failed:
            if step := self.assignment.next_of(lost.member, clocks.counted.get(lost.member, -1)):
                self._member.poison_samples.add(self._member.journal.epoch, step[1], lost.reason)

    def note_failures(self, view: View) -> None:
        """Remember the members that have failed and are lost with this view."""
        self._failed += [lost for lost in view.lost if lost.failed]

    def own_positions(self) -> Array:
        """The positions that this member is training."""
        step = self.assignment.next_of(self._member.store.member, self._member.ops.clock)
        return step[1] if step else self.assignment.left[:0]


class AsyncRounds:
    """The steps of one epoch on this worker: `begin`, the step, and `end`, until `is_over`."""

    def __init__(self, member: Member, epoch: int, first: int = 0, stop: int | None = None) -> None:
        """`first` and `stop`: see MemberRounds."""
        assert isinstance(member.steps, AsyncSteps)
        self._member, self._steps = member, member.steps
        member.journal.assign_steps(epoch, member.view, member.ops.clock, first, stop)
        self._part_of = self.assignment  # for which `part` was asked
        self.count = first  # steps of this worker
        self.checksum: Array | None = None  # see MemberRounds

    @property
    def assignment(self) -> AsyncAssignment:
        return self._steps.assignment

    @property
    def step(self) -> int:
        """The step of a job that is not elastic with as many samples before it; learning rates follow it."""
        return self.assignment.step_at(self._member.ops.clock)

    def is_over(self) -> bool:
        """Whether all samples of the epoch are used. If this worker has none left, it waits for the others. In a view
        that drains it waits for the next view."""
        over = self._member.store.repeat(self._is_over)
        self._member.ops.wait_for_change()
        return over

    def _is_over(self) -> bool:
        """When all samples are used, all members take the weights after the last step. The two barriers are the last
        ops of a view that drains: see APART in scheduler/membership/kind_change.py."""
        store, ops, drains = self._member.store, self._member.ops, self._member.view.drains
        if self.assignment.next_of(store.member, ops.clock):
            return False
        if not drains:
            self._admit()
        ops.rest(self.assignment.end)
        store.barrier()
        ops.steps.take_weights()  # all steps are made: these are the same for all
        store.barrier()  # all hold the one before: nobody makes steps of the next epoch while others are in this one
        if not drains:
            self.assignment.finish()
        return not drains

    def _admit(self) -> None:
        """Before a step, or when no step is left: let workers that wait join or leave."""
        if self._member.view.leader == self._member.store.member:
            self._member.ops.admit()

    @property
    def has_moved(self) -> bool:
        """Whether the steps to come are not those of the last `part` any more."""
        return self.assignment is not self._part_of

    def part(self, epoch: Epoch) -> Part:
        """The samples of this worker from its next step on, until `end` says otherwise."""
        self._part_of, self._member.order = self.assignment, epoch
        return self.assignment.part(self._member.store.member, self._member.ops.clock, epoch)

    def begin(self) -> tuple[Array, int]:
        """Call this before the first push of a step. Returns its positions, int64, and their number. Workers that wait
        may join here. Raises JobLost."""
        member, store, ops = self._member, self._member.store, self._member.ops
        self._admit()
        step = self.assignment.next_of(store.member, ops.clock)
        assert step is not None  # see is_over, and part
        ops.steps.skip_to(step[0] - 1)
        self._steps.begun = True
        member.journal.began(step[0], member.view, step[1])
        self.checksum = sample_checksum.of(step[1])
        return step[1], len(step[1])

    def end(self, checksums: Array) -> bool:
        """The step was made; `checksums`: this worker's, float64 (3,). Returns whether the steps to come are not those
        of the last `part`."""
        self._steps.begun = False
        self._member.journal.committed_step(self._member.ops.clock, checksums)
        self.count += 1
        return self.has_moved
