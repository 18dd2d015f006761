"""The times at the start of log lines: Python's `2026-11-20 12:00:00,123`, Caffe's `I0605 03:34:06.123456`, and
`[09/03/2023 16:29:28 INFO`. Only differences of times in one log are used, so their time zone does not matter.
"""

from __future__ import annotations

import calendar
import re

from dmltrain.report.block import Block

_SEARCHED = 1 << 20  # bytes at the start of a log in which its first time is expected
_PREFIX = 200  # bytes of a line in which its time is expected
_CLOCK = rb"([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:[.,](\d{1,9}))?(?!\d| ?[AP]M)"
_STAMP = re.compile(
    rb"(?<!\d)(\d{4})-([01]\d)-([0-3]\d)[ T]"
    + _CLOCK
    + rb"|^[IWEF]([01]\d)([0-3]\d) "
    + _CLOCK
    + rb"|(?<!\d)([01]\d)/([0-3]\d)/(\d{4}) "
    + _CLOCK,
    re.MULTILINE,
)
_YEAR = 366 * 86400.0  # Caffe's lines have no year: a log can go on in the next one


class Clock:
    """The time since the first line of a log that has one."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._searched = 0

    def feed(self, block: Block) -> None:
        """Look for the log's first time; before `seconds` for each block."""
        if self._start is None and self._searched < _SEARCHED:
            self._searched += len(block.data)
            found = _STAMP.search(block.data) if block.holds(b":") else None  # a search is slow where there is none
            self._start = _seconds(found) if found else None

    @property
    def running(self) -> bool:
        """Whether the log has times."""
        return self._start is not None

    def of_block(self, block: Block) -> float | None:
        """From the log's first time to the first one of a block; None without one."""
        found = _STAMP.search(block.data)
        return self._passed(found) if found else None

    def seconds(self, data: bytes, at: int) -> float | None:
        """From the log's first time to that of the line that has position `at` of a block's data; None without one."""
        line = max(data.rfind(b"\n", 0, at), data.rfind(b"\r", 0, at)) + 1
        found = _STAMP.search(data[line : min(at, line + _PREFIX)])
        return self._passed(found) if found else None

    def _passed(self, found: re.Match[bytes]) -> float | None:
        if self._start is None:
            return None
        passed = _seconds(found) - self._start
        if passed < 0 and found[8]:
            passed += _YEAR
        return round(passed, 6) if passed >= 0 else None


def _seconds(found: re.Match[bytes]) -> float:
    """Since an arbitrary moment."""
    if found[1]:
        year, month, day, *clock = found.group(1, 2, 3, 4, 5, 6, 7)
    elif found[8]:
        year, (month, day, *clock) = b"2000", found.group(8, 9, 10, 11, 12, 13)
    else:
        month, day, year, *clock = found.group(14, 15, 16, 17, 18, 19, 20)
    days = calendar.timegm((int(year), max(1, min(12, int(month))), 1, 0, 0, 0)) + (int(day) - 1) * 86400
    hours, minutes, seconds, fraction = clock
    return days + int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(b"0." + (fraction or b"0"))
