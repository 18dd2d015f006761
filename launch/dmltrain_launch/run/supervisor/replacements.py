"""How many replacements an elastic job starts for lost workers, or lost servers, on which hosts, and when. Pure.

A replacement starts on the host of the lost process if that host is usable. Else, of the hosts with room, it starts on
the one with the fewest processes of this role. The wait before a host's next replacement is FIRST_SECONDS, and doubles
with each further loss there, up to LONGEST_SECONDS. It begins again at FIRST_SECONDS when a replacement has lived there
for LIVED_SECONDS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dmltrain_launch.run.supervisor.limit import backoff

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
LIVED_SECONDS = 60.0


@dataclass(frozen=True)
class HostSlots:
    """How much room a usable host has for one role: how many `workers` (or servers) run there or wait for their start,
    and how many more fit (`free`)."""

    host: str
    workers: int
    free: float


@dataclass(frozen=True)
class Replacement:
    """The replacement `number` of the job, of the lost process `task`: it starts on `host` at the time `at`, in s."""

    task: int
    host: str
    number: int
    at: float


class Replacements:
    """At most `most` of them. `waiting`: those that have not been started."""

    def __init__(self, most: int):
        self.most = most
        self.waiting: list[Replacement] = []
        self._count = 0  # started or waiting
        self._losses: Counter[str] = Counter()  # by host: since the wait was FIRST_SECONDS
        self._young: dict[int, tuple[str, float]] = {}  # by task: host and start of those that may yet live long

    @property
    def used_up(self) -> bool:
        return self._count >= self.most

    @property
    def next_at(self) -> float:
        """When the next one is due; math.inf if none waits."""
        return min((replacement.at for replacement in self.waiting), default=math.inf)

    def plan(self, task: int, own: str, seats: Sequence[HostSlots], now: float) -> Replacement | None:
        """The replacement of `task`, which was on the host `own`; None if no host can take it, or all are used up."""
        host = _choose(own, seats)
        if host is None or self.used_up:
            return None
        self._count += 1
        planned = Replacement(task, host, self._count, now + self._wait(host, now))
        self.waiting.append(planned)
        return planned

    def due(self, now: float) -> list[Replacement]:
        """Those whose time has come, in the order of their times. They no longer wait."""
        ready = sorted((replacement for replacement in self.waiting if replacement.at <= now), key=lambda each: each.at)
        self.waiting = [replacement for replacement in self.waiting if replacement.at > now]
        return ready

    def drop(self, host: str | None = None) -> list[Replacement]:
        """Take back those that wait for `host`, or all that wait. They do not count towards the limit."""
        dropped = [replacement for replacement in self.waiting if host in (None, replacement.host)]
        self.waiting = [replacement for replacement in self.waiting if replacement not in dropped]
        self._count -= len(dropped)
        return dropped

    def started(self, task: int, host: str, now: float) -> None:
        """The process `task` is a replacement, which starts now."""
        self._young[task] = host, now

    def lost(self, task: int, host: str, now: float) -> None:
        """A process was lost on `host`, a replacement or another one."""
        self._forget_losses(now)
        self._young.pop(task, None)
        self._losses[host] += 1

    def _wait(self, host: str, now: float) -> float:
        self._forget_losses(now)
        return backoff(FIRST_SECONDS, LONGEST_SECONDS, self._losses[host] - 1)

    def _forget_losses(self, now: float) -> None:
        for task, (host, since) in list(self._young.items()):
            if now - since >= LIVED_SECONDS:
                del self._young[task]
                del self._losses[host]


def _choose(own: str, seats: Sequence[HostSlots]) -> str | None:
    """The host of a replacement. `own` needs no free slot, because the lost process has left its slot there."""
    if any(seat.host == own for seat in seats):
        return own
    fitting = [seat for seat in seats if seat.free >= 1]
    return min(fitting, key=lambda each: each.workers).host if fitting else None
