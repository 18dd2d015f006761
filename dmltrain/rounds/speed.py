"""How fast a member computes its samples: what --balance goes by. Pure.

What counts is the time from when a batch is there until the last of its gradients has been pushed. So neither waits for
other workers nor the reading of samples count.
"""

from __future__ import annotations

import statistics

SKIPPED = 2  # the first rounds of a view: memory for parts of another size, and samples that are read anew
ROUNDS = 3  # of a report, at least
SECONDS = 2.0  # between two reports, at least


class OwnSpeed:
    """Of one member. A report is the median of its rounds, so that one that was held up does not matter."""

    def __init__(self) -> None:
        self._view = 0
        self._skipped = 0
        self._since = 0.0  # s, the last report
        self._speeds: list[float] = []  # since then, samples per second

    def round(self, view: int, samples: int, seconds: float, now: float) -> float | None:
        """A round of this view has taken so many seconds for its samples. Returns a speed to report, samples per
        second, or None."""
        if view != self._view:
            self._view, self._skipped, self._since = view, 0, now
            self._speeds.clear()
        if self._skipped < SKIPPED:
            self._skipped += 1
            return None
        if samples and seconds > 0.0:
            self._speeds.append(samples / seconds)
        if len(self._speeds) < ROUNDS or now - self._since < SECONDS:
            return None
        found, self._since = statistics.median(self._speeds), now
        self._speeds.clear()
        return found
