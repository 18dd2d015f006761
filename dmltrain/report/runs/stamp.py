"""The times at the start of log lines: Python's `2026-11-20 12:00:00,123`, glog's `I0605 03:34:06.123456` and newer
`I20260605 03:34:06.123456`, and `[09/03/2023 16:29:28 INFO`. Only differences of times in one log are used, so their
time zone does not matter.

In `09/03/2023` either number may be the month. A number above 12 anywhere in the log tells, and dates that go back do.
If both fit and differ, such times are none, and a note says so.
"""

from __future__ import annotations

import calendar
import re
from itertools import groupby
from typing import NamedTuple

from dmltrain.report.runs.block import Block

_SEARCHED = 1 << 20  # bytes at the start of a log in which its first time is expected
_PREFIX = 200  # bytes of a line in which its time is expected
_CLOCK = rb"([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:[.,](\d{1,9}))?(?!\d| ?[AP]M)"
_STAMP = re.compile(
    rb"(?<!\d)(?P<iso>\d{4})-([01]\d)-([0-3]\d)[ T]"
    + _CLOCK
    + rb"|(?<![^\s>\]:|])[IWEF](?P<glog>\d{4})?([01]\d)([0-3]\d) "
    + _CLOCK
    + rb"|(?<!\d)(?P<either>[0-3]\d)/([0-3]\d)/(\d{4}) "
    + _CLOCK,
    re.MULTILINE,
)
_DATE = re.compile(rb"(?<!\d)([0-3]\d)/([0-3]\d)/(\d{4}) \d\d:")
_YEAR = 366 * 86400.0  # Caffe's lines have no year: a log can go on in the next one
AMBIGUOUS = "dates such as {} may be day/month or month/day, and both fit: the times of its lines are not used"


class _Asked(NamedTuple):
    """The last question to a clock, and its answer: a position in a block's data, where its line begins, the start of
    that line, in which its time can be, and the time."""

    data: bytes
    at: int
    line: int
    prefix: bytes = b""
    seconds: float | None = None


class Clock:
    """Times of a log's lines, since its first line that has one. They are final after the last block: see `settled`."""

    def __init__(self) -> None:
        self._first: re.Match[bytes] | None = None
        self._searched = 0
        self._dates: list[tuple[int, ...]] = []  # each date with slashes, as it stands there, in order
        self._by_day: dict[float, float] = {}  # seconds if the month comes first -> if the day does
        self._last = _Asked(b"", 0, 0)

    def feed(self, block: Block) -> None:
        """Look for the log's first time, and for dates; before `seconds` for each block."""
        if self._first is None and self._searched < _SEARCHED:
            self._searched += len(block.data)
            self._first = _STAMP.search(block.data) if block.holds(b":") else None  # a search is slow if there is none
        if self._first and self._first["either"]:
            new = [tuple(map(int, date)) for date, _ in groupby(_DATE.findall(block.data))]
            self._dates += [date for date, _ in groupby(new) if date not in self._dates[-1:]]

    @property
    def running(self) -> bool:
        """Whether a time was found in the log."""
        return self._first is not None

    def of_block(self, block: Block) -> float | None:
        """From the log's first time to the first one of a block; None without one."""
        match = _STAMP.search(block.data)
        return self._passed(match) if match else None

    def seconds(self, data: bytes, at: int) -> float | None:
        """From the log's first time to that of the line that has position `at` of a block's data; None without one."""
        last = self._last  # a line of a megabyte can have 100,000 epochs, so it is looked at once
        since, line = (last.at, last.line) if last.data is data and last.at <= at else (0, 0)
        line = max(line, data.rfind(b"\n", since, at) + 1, data.rfind(b"\r", since, at) + 1)
        prefix = data[line : min(at, line + _PREFIX)]
        if last.data is not data or last.line != line or last.prefix != prefix:
            match = _STAMP.search(prefix)
            last = _Asked(data, at, line, prefix, self._passed(match) if match else None)
        self._last = last._replace(at=at)
        return last.seconds

    def settled(self, seconds: float | None) -> float | None:
        """What `seconds` is after the whole log was read; None if its dates can be read in two ways."""
        self._last = _Asked(b"", 0, 0)  # a clock may live for long: it keeps no block in memory
        if seconds is None or not self._by_day:
            return seconds
        fits = [day_first for day_first in (False, True) if _fits(self._dates, day_first)]
        if len(fits) != 1 and len(set(self._dates)) > 1:
            return None
        passed = self._by_day.get(seconds, seconds) if fits == [True] else seconds
        return passed if passed >= 0 else None

    def notes(self) -> tuple[str, ...]:
        """Remarks for readers of the table."""
        if not self._by_day or self.settled(next(iter(self._by_day))) is not None or len(set(self._dates)) < 2:
            return ()
        fits = [day_first for day_first in (False, True) if _fits(self._dates, day_first)]
        day, month, year = self._dates[0]
        return (AMBIGUOUS.format(f"{day:02}/{month:02}/{year}"),) if len(fits) != 1 else ()

    def _passed(self, match: re.Match[bytes]) -> float | None:
        if self._first is None:
            return None
        passed = _seconds(match) - _seconds(self._first)
        if match["either"] and self._first["either"]:
            passed = round(passed, 6)
            self._by_day[passed] = round(_seconds(match, True) - _seconds(self._first, True), 6)
            return passed
        if passed < 0 and match[9] and not match["glog"]:
            passed += _YEAR
        return round(passed, 6) if passed >= 0 else None


def _fits(dates: list[tuple[int, ...]], day_first: bool) -> bool:
    """Whether the dates of a log can be read in this order of month and day: no month above 12, and none goes back."""
    calendar_dates = [(year, b, a) if day_first else (year, a, b) for a, b, year in dates]
    return all(month <= 12 for _, month, _ in calendar_dates) and calendar_dates == sorted(calendar_dates)


def _seconds(match: re.Match[bytes], day_first: bool = False) -> float:
    """The seconds of a time since an arbitrary moment, the same for all times of a log."""
    if match["iso"]:
        year, month, day, *clock = match.group(1, 2, 3, 4, 5, 6, 7)
    elif match["either"]:
        month, day, year, *clock = match.group(15, 16, 17, 18, 19, 20, 21)
        month, day = (day, month) if day_first else (month, day)
    else:
        year, (month, day, *clock) = match["glog"] or b"2000", match.group(9, 10, 11, 12, 13, 14)
    days = calendar.timegm((int(year), max(1, min(12, int(month))), 1, 0, 0, 0)) // 86400 + int(day) - 1
    days += 366 * max(0, int(month) - 12)  # no valid month: still another moment than all valid ones
    hours, minutes, seconds, fraction = clock
    return days * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(b"0." + (fraction or b"0"))
