"""How much longer the slowest worker computes in a step than the median of all. Pure.

The launcher reads what is logged here (launch/run/scheduler_log.py), and applies the job's rules to it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from dmltrain.kvstore.scheduler.actions import Action, Log


@dataclass
class Stragglers:
    """Of one job's `workers`. A line is logged when all have reported since the last one."""

    workers: int
    _seconds: dict[int, float] = field(default_factory=dict)  # by worker

    def take(self, worker: int, seconds: float) -> list[Action]:
        """A worker computes for so long in a step."""
        self._seconds[worker] = seconds
        if len(self._seconds) < self.workers:
            return []
        median = statistics.median(self._seconds.values())
        slowest = max(self._seconds, key=lambda each: self._seconds[each])
        more = 100 * (self._seconds[slowest] / median - 1)
        self._seconds.clear()
        return [Log(f"worker {slowest} computes {more:.1f} % longer in a step than the median of {median:.4g} s")]
