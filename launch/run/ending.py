"""The end of a job on all its hosts: who was asked to end it, and what each left. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from launch.agent import KILL_SECONDS
from launch.agent.commands import Job as JobCommand
from launch.agent.commands import Stop
from launch.job.job import Job
from launch.run.action import Send
from launch.run.limit import ANSWER_SECONDS, Limits


class Ending:
    """Every agent is asked once, and asked again only to hurry. An agent that cannot answer is replaced, once.

    `begun` says whether the end has begun; the job is `over` when each host has said what is left on it.
    """

    def __init__(self, job: Job, limits: Limits):
        self.job, self.limits, self.grace = job, limits, limits.grace
        self.begun = False
        self.left: dict[str, tuple[int, ...] | None] = {}  # by host; None when nobody could look
        self.unreached: set[str] = set()  # hosts that never had an agent
        self.stopped: list[str] = []  # labels of processes found in state T
        self.give_up_at = math.inf  # s: when an agent that has not answered is given up
        self._asked: set[str] = set()  # hosts whose agent was told of the job
        self._recovering: set[str] = set()  # hosts whose agent is being replaced

    def over(self, hosts: Collection[str]) -> bool:
        return self.begun and self.left.keys() | self.unreached == set(hosts)

    @property
    def clean(self) -> bool:
        """Whether no process is left, as far as is known."""
        return not any(pids or pids is None for pids in self.left.values())

    def connected(self, host: str, key: str, log_folder: str | None) -> list[Send]:
        """The first commands for an agent; one that replaces another is to end the job."""
        if host in self.unreached:
            return []  # it came too late: without a job its agent ends by itself
        self._asked.add(host)
        again = host in self._recovering
        secret = ("", None) if again else (key, log_folder)
        job = JobCommand(self.job.mark, host, self.grace, self.limits.agent_silence, *secret)
        return [Send(host, job), Send(host, Stop(self.grace))] if again else [Send(host, job)]

    def begin(self, hosts: Collection[str], now: float, dump: bool) -> list[Send]:
        """Ask every agent to end the job's processes; again, to hurry. `dump`: print their stacks first."""
        self.begun = True
        self._wait_from(now)
        self.unreached |= set(hosts) - self._asked
        done = self.left.keys() | self.unreached | self._recovering
        return [Send(name, Stop(self.grace, dump)) for name in hosts if name not in done]

    def is_being_replaced(self, host: str) -> bool:
        return host in self._recovering

    def knows(self, host: str) -> bool:
        """Whether nothing more is expected from the host."""
        return host in self.left or host in self.unreached

    def replace(self, host: str, now: float) -> None:
        self._recovering.add(host)
        self._wait_from(now)

    def unanswered(self, hosts: Collection[str]) -> list[str]:
        return [name for name in hosts if name not in self.left]

    def _wait_from(self, now: float) -> None:
        self.give_up_at = now + self.grace + KILL_SECONDS + ANSWER_SECONDS
