"""The log lines about peers that could not prove that they belong to the job: a few, and then a count. Pure."""

from __future__ import annotations

LINES = 5  # of single peers in each period
PERIOD_SECONDS = 10.0


class Unauthenticated:
    """`name`: of the listener."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = -PERIOD_SECONDS  # of this period
        self._lines = 0  # in this period
        self._unnamed = 0  # peers of this period without a line of their own
        self._last = ""

    def report(self, origin: str, reason: str, now: float) -> str:
        """A peer has been cut off: the line for the log, or "" if it is only counted."""
        if now - self._began >= PERIOD_SECONDS and not self._unnamed:
            self._began, self._lines = now, 0
        if self._lines < LINES:
            self._lines += 1
            return f"{self._name}: cut off an unauthenticated peer from {origin}: {reason}"
        self._unnamed += 1
        self._last = f"{origin}: {reason}"
        return ""

    def later(self, now: float, last: bool = False) -> str:
        """The line for the log when a period is over that had peers without a line, or if it is the `last`, else ""."""
        if not self._unnamed or (now - self._began < PERIOD_SECONDS and not last):
            return ""
        line = (
            f"{self._name}: cut off {self._unnamed:,} more unauthenticated peers in {now - self._began:.0f} s, "
            f"the last from {self._last}"
        )
        self._began, self._unnamed = now, 0
        return line
