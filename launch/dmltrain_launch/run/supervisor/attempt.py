"""The state of one attempt to run a job, as the supervisor changes it and reports read it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.task import Ports
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.cause import Cause, Verdict
from dmltrain_launch.run.supervisor.ending import Ending
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, TIMEOUT_CODE, UNLIMITED, USAGE_CODE, Limits
from dmltrain_launch.run.supervisor.losses import Losses
from dmltrain_launch.run.supervisor.policy import END, Policy
from dmltrain_launch.run.supervisor.prepare import Preparation
from dmltrain_launch.run.supervisor.process import Process, Processes
from dmltrain_launch.run.supervisor.replace import Replacer
from dmltrain_launch.run.supervisor.starter import Starter
from dmltrain_launch.run.supervisor.succession import Succession


@dataclass(frozen=True)
class KVStoreChange:
    """The kvstore has changed `after` s from the job's start, to `now`, on all workers. `where`: in their training."""

    after: float
    now: str
    by: str  # who has asked for it
    where: str  # "after step 147", "from view 3 on"

    @property
    def text(self) -> str:
        return f"{self.now} on all workers {self.where}"


@dataclass(frozen=True)
class Announcement:
    """A text for the user. `process`: show its last lines, too."""

    text: str
    process: Process | None = None


class Attempt:
    """`policy`: what a loss means. With `check` the job ends before its first process starts.

    `announcements`: those that nobody has taken yet. Times are those of the supervisor's clock, in s.
    """

    def __init__(
        self, job: Job, hosts: Sequence[Host], limits: Limits = UNLIMITED, policy: Policy = END, check: bool = False
    ):
        self.job, self.limits, self.policy, self.check = job, limits, policy, check
        self.preparation = Preparation(job, hosts, check)
        self.starter = Starter(job, hosts, Ports())
        self.verdict = Verdict()
        self.replacer = Replacer(job, policy)
        self.losses = Losses(policy.goes_on, self.replacer.may_replace)
        self.succession = Succession(policy, job.port)
        self.ending = Ending(job, limits)
        self.announcements: list[Announcement] = []
        self.kvstore_changes: list[KVStoreChange] = []
        self.interrupted = False
        self.began = 0.0
        self.timeout_at = self.start_at = self.finish_at = math.inf  # times at which something is due
        self._warned = 0

    @property
    def hosts(self) -> dict[str, Host]:
        """Hosts by name, completed by what their agents have reported."""
        return self.preparation.hosts

    @property
    def usable(self) -> list[Host]:
        """The hosts on which processes can be started."""
        return [host for name, host in self.hosts.items() if self.ending.is_usable(name)]

    @property
    def tasks(self) -> Processes:
        return self.starter.processes

    @property
    def processes(self) -> list[Process]:
        return self.tasks.all

    @property
    def workers_left(self) -> bool:
        """Whether there is a worker that is not lost, or one is to come, or the scheduler may wait for one."""
        waits = self.job.wait_for_hosts and self.tasks.scheduler_lives
        return bool(self.tasks.workers_left or self.replacer.waiting or waits)

    @property
    def servers_left(self) -> bool:
        """Whether there is a server that is not lost, or one is to come; also where the job has none."""
        servers = self.tasks.servers
        return not servers or bool(self.tasks.servers_left or self.replacer.of_servers.waiting)

    @property
    def cause(self) -> Cause | None:
        return self.verdict.cause

    @property
    def over(self) -> bool:
        return self.ending.over(self.hosts)

    @property
    def unready(self) -> str:
        """Why nothing that the user asks for can change now, or empty."""
        if self.ending.begun or self.tasks.a_worker_done:
            return "the job is ending"
        if not self.tasks.started or not self.preparation.done:
            return "the job is still starting: try again when all its processes run"
        return ""

    @property
    def why_ended(self) -> str:
        """For those who wait for a change that will not come."""
        return f"the job has ended{f': {self.cause.text}' if self.cause else ''}"

    @property
    def deadline(self) -> float:
        return min(
            self.timeout_at,
            self.start_at,
            self.finish_at,
            self.verdict.together_at,
            self.verdict.suspect_at,
            self.replacer.next_at,
            self.ending.give_up_at,
        )

    @property
    def exit_code(self) -> int:
        if self.cause:
            return self.cause.code
        return 0 if self.ending.clean else FAULT_CODE

    @property
    def restartable(self) -> bool:
        """Whether a restart may help: a process or a host was lost."""
        if self.cause is None or self.interrupted or self.exit_code in (USAGE_CODE, TIMEOUT_CODE):
            return False
        return self.tasks.started and (self.cause.process is not None or self.cause.code == FAULT_CODE)

    def fail(self, cause: Cause, now: float, dump: bool = False) -> list[Action]:
        """End the job, if it is not ending. `dump`: its processes print their stacks first."""
        self.verdict.decide(cause, self.hosts)
        return [] if self.ending.begun else self.end(now, dump)

    def end(self, now: float, dump: bool = False) -> list[Action]:
        self.timeout_at = self.start_at = self.finish_at = math.inf
        self.verdict.clear_deadlines()
        self.replacer.cancel()
        return list(self.ending.begin(self.hosts, now, dump))

    def announce(self, text: str, process: Process | None = None) -> None:
        """Tell the user."""
        self.announcements.append(Announcement(text, process))

    def take_announcements(self) -> list[Announcement]:
        taken, self.announcements = self.announcements, []
        return taken

    def take_warnings(self) -> list[str]:
        """The preparation's new warnings."""
        problems, self._warned = self.preparation.problems[self._warned :], len(self.preparation.problems)
        return [problem.text for problem in problems if not problem.fatal]
