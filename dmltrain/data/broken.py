"""Records that cannot be read or decoded: how many a job may skip, and what is said about each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dmltrain.errors import UserError


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

    def note(self, problem: str) -> None:
        """A record is skipped; `problem` names it. UserError: it is one too many. Several threads call this."""
        with self._lock:
            self._count += 1
            count = self._count
        if count > self.allowed:
            raise UserError(f"{problem}; {self._fix()}")
        self.warn(f"Skipped a record, {count} of at most {self.allowed} in this epoch: {problem}")

    def take(self) -> int:
        """The number since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count

    def check(self, everywhere: int) -> None:
        """UserError: all workers together have skipped too many records in an epoch."""
        if everywhere > self.allowed:
            raise UserError(f"the workers skipped {everywhere} records in this epoch; {self._fix()}")

    def _fix(self) -> str:
        allows = f"--skip-broken {self.allowed} allows no more" if self.allowed else "--skip-broken 10 would skip ten"
        return f"{allows}; dmltrain-data verify lists all broken records"
