"""Why a job ends before its workers are done: what went wrong, and which of several faults decides. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from launch.run.limit import FAULT_CODE, SUSPECT_SECONDS, TOGETHER_SECONDS
from launch.run.process import Process


@dataclass(frozen=True)
class Cause:
    """Exit code, text, and the process when it was one."""

    code: int
    text: str
    process: Process | None = None


class Verdict:
    """The first failure decides: `cause`. Two exceptions.

    Faults of several hosts before the start are reported together. A process that ended because it lost another one is
    only a `suspect`: for SUSPECT_SECONDS it yields to another failure, and then to a host that is silent.
    """

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.suspect: Cause | None = None
        self.faults: dict[str, Cause] = {}  # by host: why it cannot do its part of the preparation
        self.silent: dict[str, float] = {}  # by host, s since anything came from it
        self.suspect_at = self.together_at = math.inf  # when to decide

    def decide(self, cause: Cause, hosts: Iterable[str]) -> None:
        """Unless it is decided already. `hosts` gives the order of the faults."""
        if self.faults:  # what several hosts have in common is said once
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
        """The first one counts."""
        if not self.suspect:
            self.suspect, self.suspect_at = cause, now + SUSPECT_SECONDS

    def from_suspect(self, suspect: Cause) -> Cause:
        """A process that lost another one is the cause, unless a whole host is silent: that is what it lost."""
        host = max(self.silent, key=lambda host: self.silent[host], default=None)
        if host is None or not self.silent[host]:
            return suspect
        text = f"nothing has come from {host} for {self.silent[host]:.0f} s: is the host down, or its network cut?"
        return Cause(FAULT_CODE, text)

    def nothing_due(self) -> None:
        self.suspect_at = self.together_at = math.inf
