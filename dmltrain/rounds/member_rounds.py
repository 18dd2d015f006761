"""The rounds of an epoch, whatever the kvstore is: it may change from one view to the next."""

from __future__ import annotations

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.parts import Epoch, Part
from dmltrain.data.assignment.sync_assignment import SyncAssignment
from dmltrain.rounds.async_steps import AsyncRounds
from dmltrain.rounds.member import Member
from dmltrain.rounds.sync_steps import SyncRounds


class MemberRounds:
    """The rounds of one epoch on this worker, or its steps: `begin`, the step, and `end`, until `is_over`.

    They use the samples of a plain job's steps from `first` to `stop` - 1, each once; None: to the epoch's end. A
    worker that has just joined goes on with the rounds that the others make, whatever it asks for.
    """

    def __init__(self, member: Member, epoch: Epoch, first: int = 0, stop: int | None = None) -> None:
        self._member, self._epoch, self._before = member, epoch, 0
        self._rounds = self._begin(first, stop)

    def _begin(self, first: int = 0, stop: int | None = None) -> SyncRounds | AsyncRounds:
        kind = SyncRounds if self._member.steps_together else AsyncRounds
        return kind(self._member, self._epoch.number, first, stop)

    def go_on(self, stop: int) -> None:
        """These rounds are over: make those up to `stop`."""
        self._rounds = self._begin(self.stop, stop)

    def is_over(self) -> bool:
        """Whether all samples are used. May wait for the others."""
        while True:
            over = self._rounds.is_over()
            if self._are_current():
                return over
            self._before = self.count
            self._rounds = self._begin()

    def _are_current(self) -> bool:
        """Whether these rounds still fit: the kvstore's type and the assignment are those with which they began."""
        together = isinstance(self._rounds, SyncRounds)
        return together == self._member.steps_together and self._rounds.assignment is self._member.journal.assignment

    @property
    def assignment(self) -> SyncAssignment | AsyncAssignment:
        return self._rounds.assignment

    @property
    def step(self) -> int:
        """The step of a job that is not elastic with as many samples before it; learning rates follow it."""
        return self._rounds.step

    @property
    def stop(self) -> int:
        """The step of a job that is not elastic at which these rounds are over."""
        return -(-self.assignment.samples // self.assignment.batch)

    @property
    def count(self) -> int:
        """How many rounds, or steps, of the epoch this worker has made."""
        return self._before + self._rounds.count

    @property
    def has_moved(self) -> bool:
        """Whether the steps to come are not those of the last `part` any more."""
        return self._rounds.has_moved

    @property
    def checksum(self) -> Array | None:
        """After `begin`: the sample checksum, float64 (3,), of what this worker has in the op that ends with this step;
        None if the step ends none, because it is one of several local steps."""
        return self._rounds.checksum

    def part(self) -> Part:
        """The samples of this worker from its next step on, until `end` says otherwise."""
        return self._rounds.part(self._epoch)

    def begin(self) -> tuple[Array, int]:
        """Call this before the first push of a step. Returns this worker's positions, int64, and how many samples are
        in the mean gradient of the step; 0 if this worker makes none, because it has just joined. Workers that wait may
        join here. Raises JobLost, MembershipEnded, Stopped."""
        return self._rounds.begin()

    def end(self, checksums: Array) -> bool:
        """The step was made; `checksums`: the sum of those of all that made it, float64 (3,). Returns whether the steps
        to come are not those of the last `part`."""
        return self._rounds.end(checksums)
