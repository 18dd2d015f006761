"""How long this worker computes in a step: what rules about stragglers go by. Pure.

What counts is the time from one step to the next without the training thread's waits for servers and other workers.
"""

from __future__ import annotations

import statistics

STEPS = 5  # of a report, at least
SECONDS = 5.0  # between two reports, at least


class OwnSteps:
    """A report is the median of some steps, so that a validation between two of them does not matter."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # when the last step ended, and the waits until then, s
        self._since = 0.0  # s, the last report
        self._times: list[float] = []  # since then

    def made(self, now: float, waited: float) -> float | None:
        """A step has been made; `waited`: all waits so far, s. Returns seconds to report, or None."""
        before, self._last = self._last, (now, waited)
        if before is None:
            self._since = now
            return None
        self._times.append(max(0.0, now - before[0] - (waited - before[1])))
        if len(self._times) < STEPS or now - self._since < SECONDS:
            return None
        found, self._since = statistics.median(self._times), now
        self._times.clear()
        return found or None
