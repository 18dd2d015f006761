"""What the scheduler says about changes of the running job, read from its output. Pure."""

from __future__ import annotations

import re

from dmltrain_launch.run.supervisor.event import ASKED, MADE, REFUSED, Leaves, Slowest, Told, Viewed

STAMP = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
VIEW = re.compile(STAMP + rb"view (\d{1,9}) after op \d+: workers (\d{1,6}(?:, \d{1,6})*)")
LEAVES = re.compile(STAMP + rb"worker (\d{1,6}) on \S+ leaves on purpose: (.*)")
CHANGE = re.compile(STAMP + rb"change (\d{1,9}) is asked for by .*")
NO_CHANGE = re.compile(STAMP + rb"change (\d{1,9}) is refused: (.*)")
CHANGED = re.compile(STAMP + rb"change (\d{1,9}) (after step \d{1,18}) of all workers: (.*)")
IN_VIEW = re.compile(STAMP + rb"change (\d{1,9}) (from view \d{1,9} on): (.*)")
SLOWEST = re.compile(STAMP + rb"worker (\d{1,6}) computes (\d{1,9}\.\d) % longer in a step than the median of .* s")
MOST_BYTES = 1 << 16  # of a line; a view of 1,000 workers needs a tenth


class SchedulerLog:
    """Call `feed` with each piece of the output, in order."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Viewed | Leaves | Told | Slowest]:
        """What the complete lines say."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MOST_BYTES:]
        return [event for line in lines if (event := _read(line))]


def _read(line: bytes) -> Viewed | Leaves | Told | Slowest | None:
    if match := VIEW.fullmatch(line):
        return Viewed(int(match[1]), tuple(map(int, match[2].split(b", "))))
    if match := LEAVES.fullmatch(line):
        return Leaves(int(match[1]), match[2].decode(errors="replace"))
    if match := CHANGE.fullmatch(line):
        return Told(int(match[1]), ASKED)
    if match := NO_CHANGE.fullmatch(line):
        return Told(int(match[1]), REFUSED, match[2].decode(errors="replace"))
    if match := CHANGED.fullmatch(line) or IN_VIEW.fullmatch(line):
        return Told(int(match[1]), MADE, match[3].decode(errors="replace"), match[2].decode())
    if match := SLOWEST.fullmatch(line):
        return Slowest(int(match[1]), float(match[2]))
    return None
