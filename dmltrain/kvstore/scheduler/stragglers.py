"""How much longer the slowest worker computes in a step than the median of all. Pure.

The launcher reads what is logged here (launch/run/scheduler_log.py), and applies the job's rules to it.
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
        present = {*workers}
        known = {**self._seconds, worker: seconds}
        self._seconds = {each: known[each] for each in known if each in present}
        if worker not in present or self._seconds.keys() < present:
            return []
        median = statistics.median(self._seconds.values())
        slowest = max(self._seconds, key=lambda each: self._seconds[each])
        more = 100 * (self._seconds[slowest] / median - 1)
        self._seconds.clear()
        return [Log(f"worker {slowest} computes {more:.1f} % longer in a step than the median of {median:.4g} s")]
