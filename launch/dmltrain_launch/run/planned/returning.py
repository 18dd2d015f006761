"""Hosts of the hosts file that a job with --watch-hosts has lost: it tries them again, as after a reboot. Pure.

A host is tried FIRST_SECONDS after its loss. The wait doubles with each try, up to LONGEST_SECONDS. It begins again at
FIRST_SECONDS if the host is lost after it has been used for LIVED_SECONDS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.placement import default_workers
from dmltrain_launch.run.planned.arrivals import Arrivals
from dmltrain_launch.run.planned.waiters import Waiter
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.limit import backoff

FIRST_SECONDS, LONGEST_SECONDS = 10.0, 600.0
LIVED_SECONDS = 600.0


@dataclass
class _Lost:
    """A host that the job does not have now. `due`: the time of the next try, in s."""

    tries: int
    due: float


@dataclass(frozen=True)
class _Back:
    """A host that has come back after `tries` tries, at the time `since`, in s."""

    tries: int
    since: float


class Returning:
    """`listed()`: the hosts of the file as it is now, by name."""

    def __init__(self, attempt: Attempt, arrivals: Arrivals, listed: Callable[[], Mapping[str, Host]]):
        self._attempt, self._arrivals, self._listed = attempt, arrivals, listed
        self._lost: dict[str, _Lost] = {}
        self._back: dict[str, _Back] = {}

    @property
    def deadline(self) -> float:
        if self._attempt.ending.begun:
            return math.inf
        return min((lost.due for lost in self._lost.values()), default=math.inf)

    def settle(self, now: float) -> None:
        """Note which hosts are lost, and which have come back. Call it after each event."""
        used, listed = {host.name for host in self._attempt.usable}, self._listed()
        for name in list(self._lost):
            if name in used:
                self._back[name] = _Back(self._lost.pop(name).tries, now)
            elif name not in listed:
                del self._lost[name]
        for name in sorted(self._attempt.ending.given_up & listed.keys() - self._lost.keys()):
            back = self._back.pop(name, None)
            tries = back.tries if back and now - back.since < LIVED_SECONDS else 0
            self._lost[name] = _Lost(tries, now + _wait(tries))
            again = f"it is tried again in {_wait(tries):g} s (--watch-hosts)"
            self._attempt.announce(f"{name} is in the hosts file: {again}")

    def tick(self, now: float) -> list[Action]:
        """Try the hosts whose time has come."""
        if self._attempt.ending.begun:
            return []
        due = [name for name, lost in self._lost.items() if lost.due <= now]
        return [action for name in due for action in self._try(name, now)]

    def _try(self, name: str, now: float) -> list[Action]:
        lost, host = self._lost[name], self._listed()[name]
        lost.due = now + _wait(lost.tries)  # when to look again if it cannot be tried now; that does not count as a try
        workers = min(default_workers(host), self._arrivals.missing)
        ended = name not in self._attempt.hosts or self._attempt.ending.may_be_reused(name)
        if not workers or not ended or self._arrivals.is_coming(name) or self._attempt.unready:
            return []
        lost.tries += 1
        lost.due = now + _wait(lost.tries)
        try:
            self._arrivals.check(workers)
            return self._arrivals.add(host, workers, Waiter(-1), now)  # nobody waits for an answer
        except LaunchError as error:
            self._attempt.announce(f"{name} was not added: {error}")
            return []


def _wait(tries: int) -> float:
    return backoff(FIRST_SECONDS, LONGEST_SECONDS, tries)
