"""Records that cannot be read or decoded: how many a job may skip, and what is said about each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dmltrain.base.errors import UserError

LOOKED_AT = 64  # records, to see what --skip-broken would have to skip
NEARLY_ALL = 0.9  # of them: the data have another fault


@dataclass(frozen=True)
class Others:
    """How many of `looked_at` records, which are spread over all of them, cannot be used."""

    broken: int
    looked_at: int
    total: int

    @property
    def nearly_all(self) -> bool:
        return self.broken >= self.looked_at * NEARLY_ALL

    @property
    def expected(self) -> int:
        """In all records."""
        return -(-self.broken * self.total // max(1, self.looked_at))

    def __str__(self) -> str:
        if self.looked_at == self.total:
            return f"{self.broken} of all {self.total} cannot be used"
        return f"{self.broken} of {self.looked_at} that were looked at, of {self.total}, cannot be used"


def looked_at(is_broken: Callable[[int], bool], total: int) -> Others:
    """is_broken: of a record's number below `total`."""
    count = min(total, LOOKED_AT)
    return Others(sum(is_broken(number * total // count) for number in range(count)), count, total)


@dataclass(eq=False)
class Broken:
    """`allowed`: in an epoch, training and validation together. Each is reported through `warn`; one more ends the job.

    A skipped record is absent: no other takes its place. A step divides the sum of its gradients by the planned number
    of samples all the same, on which the workers have agreed without asking each other.
    """

    allowed: int
    warn: Callable[[str], None]
    _count: int = 0  # in this epoch
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, problem: str, others: Callable[[], Others]) -> None:
        """A record is skipped; `problem` names it. UserError: it is one too many. Several threads call this."""
        with self._lock:
            self._count += 1
            count = self._count
        if count > self.allowed:
            raise UserError(f"{problem}; {self._fix(others())}")
        self.warn(f"Skipped a record, {count} of at most {self.allowed} in this epoch: {problem}")

    def take(self) -> int:
        """The number since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count

    def check(self, everywhere: int) -> None:
        """UserError: all workers together have skipped too many records in an epoch."""
        if everywhere > self.allowed:
            raise UserError(
                f"the workers skipped {everywhere} records in this epoch; --skip-broken {self.allowed} "
                "allows no more; dmltrain-data verify lists all broken records"
            )

    def _fix(self, others: Others) -> str:
        listed = "dmltrain-data verify lists all broken records"
        if others.nearly_all:
            return f"{others}, so there is nothing to skip: the data have another fault than broken records; {listed}"
        if self.allowed:
            return f"--skip-broken {self.allowed} allows no more; {others}; {listed}"
        return f"--skip-broken {max(10, others.expected)} would skip up to so many in an epoch; {others}; {listed}"
