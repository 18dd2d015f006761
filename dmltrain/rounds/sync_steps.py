"""The part of a worker in an elastic job whose members make each round together: its steps of an epoch.

A round is one step of all members (dist_sync), or the average of their weights after local steps of each (dist_local).
Until its last local step this worker is in no op: what happens to the job it learns when it comes to the average. Only
a worker that the newest view does not have any more goes at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dmltrain.audit import sample_checksum
from dmltrain.base.arrays import Array
from dmltrain.data.assignment.parts import Epoch, Part
from dmltrain.data.assignment.sync_assignment import SyncAssignment
from dmltrain.kvstore.view import Lost, View
from dmltrain.kvstore.worker.clocks import Clocks

if TYPE_CHECKING:
    from dmltrain.rounds.member import Member


class SyncSteps:
    """The part of Member that depends on such a kvstore."""

    begun = False  # a round is an op of all members: this worker is never in the middle of a step of its own

    def __init__(self, member: Member) -> None:
        self._member = member

    def place(self) -> dict[str, Any]:
        """Where the job is, for new members."""
        return self._member.journal.state()

    def take_clocks(self, clocks: Clocks) -> None:
        """Nothing to do: no member makes steps of its own."""

    def state_is_shared(self) -> None:
        """All members have the state of training."""
        member = self._member
        member.journal.postponed(member.ops.done + 1, member.view)

    def note_failures(self, view: View) -> None:
        """Remember the samples of the members that have failed and are lost with this view."""
        if assignment := self._member.journal.assignment:
            for lost in view.lost:
                if lost.failed:
                    positions = self._positions_at_failure(assignment, view, lost)
                    self._member.poison_samples.add(self._member.journal.epoch, positions, lost.reason)

    def _positions_at_failure(self, assignment: SyncAssignment, view: View, lost: Lost) -> Array:
        """The positions that the lost member was training when it failed. It may have completed the round that the
        others now make again without it; then these are its positions of the round after that."""
        before = self._member.before
        if lost.failed > view.base + 1 and not assignment.finished and before:
            assignment = assignment.after(before.members, before.shares)
        return assignment.positions_of(lost.member)

    def own_positions(self) -> Array:
        """The positions that this member is training."""
        own: Array = self._member.journal.assignment.positions_of(self._member.store.member)
        return own


class SyncRounds:
    """The steps of one epoch on this worker: `begin`, the step, and `end`, until `is_over`."""

    has_moved = False  # a new view begins only within a round, and the `end` of its last step reports it

    def __init__(self, member: Member, epoch: int, first: int = 0, stop: int | None = None) -> None:
        """`first` and `stop`: see MemberRounds."""
        self._member = member
        self._assignment, self._has_joined = member.journal.assign(epoch, member.view, first, stop)
        self._part_view = member.view  # for which `part` was asked
        self._begun = member.view, 0, 0.0  # of this round: the view, this worker's samples, and when, s
        self._made = 0  # local steps in this round
        self._ends = True  # whether the present step is the last one of its round
        self.checksum: Array | None = None  # see MemberRounds

    @property
    def assignment(self) -> SyncAssignment:
        return self._assignment

    def is_over(self) -> bool:
        """Whether all samples of the epoch are used. In a view that drains this waits for the next view."""
        self._member.ops.wait_for_change()
        return self.assignment.finished

    @property
    def step(self) -> int:
        """The step of a job that is not elastic with as many samples before it; learning rates follow it."""
        return self.assignment.step_after(self._made)

    @property
    def count(self) -> int:
        """How many steps of the epoch this worker has made, or would have, had it been there from the start."""
        return self.assignment.steps + self._made

    def part(self, epoch: Epoch) -> Part:
        """The samples of this worker from the present round on, until `end` says otherwise."""
        self._part_view, self._member.order = self._member.view, epoch
        return self.assignment.part(self._member.store.member, epoch)

    def begin(self) -> tuple[Array, int]:
        """See MemberRounds."""
        store, present = self._member.store, self.assignment
        positions = present.positions_of(store.member)
        if self._made == 0:
            self._begin_round(positions)
        self._ends = self._made + 1 >= present.round.steps_of(store.member)
        self.checksum = sample_checksum.of(positions) if self._ends else None
        if not store.kvstore_type.steps_alone:
            return positions, present.round.size
        self._member.ops.go_if_out()
        own = present.step_of(store.member, self._made)
        return own, max(1, len(own)) if store.member in present.round.members else 0

    def _begin_round(self, positions: Array) -> None:
        """Before the first push of the round. Those who wait may join."""
        member = self._member
        store, ops, view = member.store, member.ops, member.view
        if view.leader == store.member:
            ops.admit()
        member.journal.began(ops.done + 1, view, positions)
        self._begun = view, len(positions), time.perf_counter()

    def end(self, checksums: Array) -> bool:
        """The step was made; `checksums`: the sum of all members' if it was the last of its round, float64 (3,).
        Returns whether the steps to come are not those of the last `part`."""
        if not self._ends:
            self._made += 1
            return False
        self._made = 0
        member, view = self._member, self._member.view
        joined, self._has_joined = self._has_joined, False  # the first round of a new member is a carried one
        if member.journal.take_missed():  # the round that follows was assigned before the view, as for the others
            return joined
        began, samples, since = self._begun
        if view is began:
            member.measured(view, samples, member.store.pushed - since)
        member.journal.committed(member.ops.done, view, self.assignment.round.size, checksums)
        self.assignment.committed(view.members, view.shares)
        return joined or view is not self._part_view or view.drains
