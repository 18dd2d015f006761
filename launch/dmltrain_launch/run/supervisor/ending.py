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
        self._recovering: dict[str, float] = {}  # hosts whose agent is replaced: s until which it may take to start

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

    def knows(self, host: str) -> bool:
        """Whether the host has reported its end, or was never reached."""
        return host in self.left or host in self.unreached

    def serves(self, host: str) -> bool:
        """Whether the host has the agent that has started the job's processes there."""
        return self.hears(host) and host not in self.leaving | self.coming

    def hears(self, host: str) -> bool:
        """The same, also while the host is given back."""
        lost = self.given_up | self._recovering.keys()
        return host in self._with_job and not self.knows(host) and host not in lost

    def release(self, host: str) -> list[Send]:
        """End the agent of a host that is not used any more."""
        self.leaving.add(host)
        return [] if self.knows(host) or host in self._recovering or self.begun else [Send(host, Stop(self.grace))]

    def may_return(self, host: str) -> bool:
        """Whether another agent can be started on a host that the job has used before."""
        return host in self.closed

    def returns(self, host: str) -> None:
        """A host that was used before is used again, as if it were new."""
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
