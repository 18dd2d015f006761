"""Records that cannot be read or decoded: how many a job may skip, and what is said about each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dmltrain.base.errors import UserError

LOOKED_AT = 64  # records that are examined, to estimate what --skip-broken would have to allow
NEARLY_ALL = 0.9  # if this fraction of them is broken, the data have another fault


class TooManyBroken(UserError):
    """More records are broken than the user allows: an error of the data, not of this worker."""


@dataclass(frozen=True)
class BrokenEstimate:
    """Of `examined` records, at equal distances among all `total` records, `broken` cannot be used."""

    broken: int
    examined: int
    total: int

    @property
    def nearly_all(self) -> bool:
        return self.broken >= self.examined * NEARLY_ALL

    @property
    def expected(self) -> int:
        """The estimated number of broken records among all."""
        return -(-self.broken * self.total // max(1, self.examined))

    def __str__(self) -> str:
        if self.examined == self.total:
            return f"{self.broken} of all {self.total} cannot be used"
        return f"{self.broken} of {self.examined} that were looked at, of {self.total}, cannot be used"


def estimate_broken(is_broken: Callable[[int], bool], total: int) -> BrokenEstimate:
    """Examine some of `total` records. is_broken(number): whether the record of this number cannot be used."""
    count = min(total, LOOKED_AT)
    return BrokenEstimate(sum(is_broken(number * total // count) for number in range(count)), count, total)


@dataclass(eq=False)
class SkippedRecords:
    """Counts skipped records. allowed: per epoch, in training and validation together; one more ends the job. warn: is
    called with a line for each skipped record.

    No other sample takes the place of a skipped record. A step still divides the sum of its gradients by the planned
    number of samples: all workers know that number without asking each other.
    """

    allowed: int
    warn: Callable[[str], None]
    _problems: set[str] = field(default_factory=set)  # in this epoch
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, problem: str, is_tested: bool, others: Callable[[], BrokenEstimate]) -> None:
        """Count a skipped record, once: a member of an elastic job may read it again in another view. `problem` names
        it. `is_tested`: it is for a test, and not for training. UserError: it is one too many. Several threads call
        this."""
        key = f"{'test' if is_tested else 'training'}: {problem}"
        with self._lock:
            if key in self._problems:
                return
            self._problems.add(key)
            count = len(self._problems)
        if count > self.allowed:
            kind = TooManyBroken if self.allowed else UserError  # without an option a copy of the data may be at fault
            raise kind(f"{problem}; {self._fix(others())}")
        self.warn(f"Skipped a record, {count} of at most {self.allowed} in this epoch: {problem}")

    def take(self) -> set[str]:
        """The problems of the records skipped since the last call."""
        with self._lock:
            problems, self._problems = self._problems, set()
        return problems

    def check(self, everywhere: int) -> None:
        """UserError if all workers together have skipped `everywhere` records in an epoch, and these are too many."""
        if everywhere > self.allowed:
            raise UserError(
                f"the workers skipped {everywhere} records in this epoch; --skip-broken {self.allowed} "
                "allows no more; dmltrain-data verify lists all broken records"
            )

    def _fix(self, others: BrokenEstimate) -> str:
        listed = "dmltrain-data verify lists all broken records"
        if others.nearly_all:
            return f"{others}, so there is nothing to skip: the data have another fault than broken records; {listed}"
        if self.allowed:
            return f"--skip-broken {self.allowed} allows no more; {others}; {listed}"
        return f"--skip-broken {max(10, others.expected)} would skip up to so many in an epoch; {others}; {listed}"
