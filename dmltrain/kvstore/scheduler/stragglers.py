"""How much longer the slowest worker computes in a step than the median of all. Pure.

The launcher reads what is logged here (launch/dmltrain_launch/run/scheduler_log.py), and applies the job's rules to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from dmltrain.kvstore.scheduler.actions import Action, Log


class Stragglers:
    """A line is logged when all workers of the job have reported since the last one."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by worker

    def take(self, worker: int, seconds: float, workers: Iterable[int]) -> list[Action]:
        """A worker computes for so long in a step. `workers`: those that the job has now."""
        self._seconds[worker] = seconds
        present = {*workers}
        if worker not in present or not present <= self._seconds.keys():
            return []
        reported = {each: self._seconds[each] for each in present}
        self._seconds.clear()
        median = statistics.median(reported.values())
        slowest = max(reported, key=lambda each: reported[each])
        more = 100 * (reported[slowest] / median - 1)
        return [Log(f"worker {slowest} computes {more:.1f} % longer in a step than the median of {median:.4g} s")]
