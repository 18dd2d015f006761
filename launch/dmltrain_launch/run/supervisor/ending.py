"""The end of a job on all its hosts: which agents were asked to end it, and which processes are left. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from dmltrain_launch.agent import KILL_SECONDS
from dmltrain_launch.agent.commands import JobCommand, Stop
from dmltrain_launch.job.job import Job
from dmltrain_launch.run.supervisor.action import Send
from dmltrain_launch.run.supervisor.limit import ANSWER_SECONDS, Limits


class Ending:
    """Sends each agent one Stop, and another one only to shorten the grace period. Replaces a lost agent once.

    `begun`: whether the job is ending. The job is `over` when each host has reported what is left on it.
    """

    def __init__(self, job: Job, limits: Limits):
        self.job, self.limits, self.grace = job, limits, limits.grace
        self.begun = False
        self.left: dict[str, tuple[int, ...] | None] = {}  # by host: pids; None if no agent could check
        self.unreached: set[str] = set()  # hosts that never had an agent
        self.given_up: set[str] = set()  # hosts without which an elastic job went on
        self.coming: set[str] = set()  # hosts that are being prepared, while the job runs
        self.leaving: set[str] = set()  # hosts that the job does not use any more
        self.closed: set[str] = set()  # hosts whose connection has ended after their last report
        self.stopped: list[str] = []  # labels of processes found in state T
        self.give_up_at = math.inf  # s: when an agent without an answer counts as lost; inf while the job runs
        self._with_job: set[str] = set()  # hosts whose agent got the Job command
        self._recovering: dict[str, float] = {}  # hosts whose agent is replaced: by which time (s) the new one must run

    def over(self, hosts: Collection[str]) -> bool:
        return self.begun and self.left.keys() | self.unreached == set(hosts)

    @property
    def clean(self) -> bool:
        """Whether no process is left on any host that reported. A host that was given up need not report."""
        return not any(pids or (pids is None and host not in self.given_up) for host, pids in self.left.items())

    def connected(self, host: str, key: str, certificate: str, log_folder: str | None, now: float) -> list[Send]:
        """The first commands for an agent. An agent that replaces another one gets a Stop."""
        if host in self.unreached:
            return []  # it connected too late; an agent without a job exits
        self._with_job.add(host)
        again = host in self._recovering
        if again:
            self._recovering[host] = now
            self._wait_from(now)
        secret = ("", "", None) if again else (key, certificate, log_folder)
        usage = 0.0 if again else self.job.usage
        detach = self.job.detach and not again
        silence = self.limits.agent_silence
        job = JobCommand(self.job.mark, host, self.grace, silence, *secret, usage=usage, detach=detach)
        return [Send(host, job), Send(host, Stop(self.grace))] if again else [Send(host, job)]

    def begin(self, hosts: Collection[str], now: float, dump: bool) -> list[Send]:
        """Ask every agent to end the job's processes; a second call shortens the grace. `dump`: print stacks first."""
        self.begun = True
        self._wait_from(now)
        self.unreached |= set(hosts) - self._with_job
        done = self.left.keys() | self.unreached | self._recovering.keys()
        return [Send(name, Stop(self.grace, dump)) for name in hosts if name not in done]

    def is_being_replaced(self, host: str) -> bool:
        return host in self._recovering

    def has_ended(self, host: str) -> bool:
        """Whether the host has reported its end, or was never reached."""
        return host in self.left or host in self.unreached

    def is_usable(self, host: str) -> bool:
        """Whether processes can be started there: the host has an agent of the job, and neither comes nor leaves."""
        return self.has_agent(host) and host not in self.leaving | self.coming

    def has_agent(self, host: str) -> bool:
        """Whether the host has an agent of the job; also while the host is prepared or given back."""
        lost = self.given_up | self._recovering.keys()
        return host in self._with_job and not self.has_ended(host) and host not in lost

    def release(self, host: str) -> list[Send]:
        """End the agent of a host that is not used any more."""
        self.leaving.add(host)
        return [] if self.has_ended(host) or host in self._recovering or self.begun else [Send(host, Stop(self.grace))]

    def may_be_reused(self, host: str) -> bool:
        """Whether another agent can be started on a host that the job has used before: the old one is gone."""
        return host in self.closed

    def reuse(self, host: str) -> None:
        """Forget what is known of a host that was used before, so that it can be used like a new one."""
        self.left.pop(host, None)
        self._recovering.pop(host, None)
        for names in (self.unreached, self.given_up, self.leaving, self.closed, self._with_job):
            names.discard(host)

    def replace(self, host: str, now: float, seconds: float) -> None:
        """Another agent is being started on `host`, which takes `seconds` at most."""
        self._recovering[host] = now + seconds
        self._wait_from(now)

    def unanswered(self, hosts: Collection[str]) -> list[str]:
        return [name for name in hosts if name not in self.left]

    def _wait_from(self, now: float) -> None:
        if self.begun:
            self.give_up_at = max(now + self.grace + KILL_SECONDS, *self._recovering.values(), 0.0) + ANSWER_SECONDS
