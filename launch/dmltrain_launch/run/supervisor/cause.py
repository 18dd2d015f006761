"""The cause of a job's failure, and which of several faults counts as the cause. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dmltrain_launch.run.supervisor.limit import FAULT_CODE, SUSPECT_SECONDS, TOGETHER_SECONDS
from dmltrain_launch.run.supervisor.process import Process


@dataclass(frozen=True)
class Cause:
    """Exit code, text, and the process if one failed."""

    code: int
    text: str
    process: Process | None = None


class Verdict:
    """Decides the `cause`: the first failure, with two exceptions.

    Faults of several hosts before the start are reported together. A process that exited because it lost another one is
    only a `suspect`: another failure within SUSPECT_SECONDS replaces it, and so does a silent host after that. A
    process that still runs may be the one that the others have lost, and it may need time to end. For it `extend_wait`
    delays the decision.
    """

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.suspect: Cause | None = None
        self.faults: dict[str, Cause] = {}  # by host: why its preparation failed
        self.silent: dict[str, float] = {}  # by host: s since its last message
        self.suspect_at = self.together_at = math.inf  # when to decide
        self._waited_on = False

    def decide(self, cause: Cause, hosts: Iterable[str]) -> None:
        """Set the cause unless it is set. `hosts` gives the order of the faults."""
        if self.faults:  # the same text of several hosts is reported once
            texts = dict.fromkeys([cause.text, *(self.faults[name].text for name in hosts if name in self.faults)])
            cause = replace(cause, text="\n".join(texts))
        self.cause = self.cause or cause

    def add_fault(self, host: str, cause: Cause) -> None:
        self.faults[host] = cause

    def wait_for_other_faults(self, now: float) -> None:
        self.together_at = min(self.together_at, now + TOGETHER_SECONDS)

    def first_fault(self, hosts: Iterable[str]) -> Cause:
        return next(self.faults[name] for name in hosts if name in self.faults)

    def add_suspect(self, cause: Cause, now: float) -> None:
        """Note the first suspect; ignore later ones."""
        if not self.suspect:
            self.suspect, self.suspect_at = cause, now + SUSPECT_SECONDS

    def drop_suspect(self) -> None:
        """All workers have done their work: a process that lost a worker only saw its normal end."""
        self.suspect, self.suspect_at = None, math.inf

    def extend_wait(self, now: float, seconds: float) -> bool:
        """Delay the decision by `seconds`, for a process that still runs. Returns whether it is delayed.

        It is delayed once only, and not if a host is silent, because then that host is the cause.
        """
        if self._waited_on or any(self.silent.values()):
            return False
        self._waited_on, self.suspect_at = True, now + seconds
        return True

    def cause_after_suspect(self, suspect: Cause) -> Cause:
        """The cause after SUSPECT_SECONDS: the silent host that the process lost, else the process itself."""
        host = max(self.silent, key=lambda host: self.silent[host], default=None)
        if host is None or not self.silent[host]:
            return suspect
        text = f"no heartbeat from {host} for {self.silent[host]:.0f} s: is the host down, or its network cut?"
        return Cause(FAULT_CODE, text)

    def clear_deadlines(self) -> None:
        self.suspect_at = self.together_at = math.inf
