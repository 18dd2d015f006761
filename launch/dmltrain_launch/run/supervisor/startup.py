"""A job from the first agent to the start of its processes, and why it does not get there. Pure.

prepare.py prepares the hosts. If that fails on several hosts, their problems are reported together: while hosts
connect, the job's end waits until all have connected or failed; in later steps it waits for TOGETHER_SECONDS.
"""

from __future__ import annotations

import math

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import events
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.cause import Cause
from dmltrain_launch.run.supervisor.event import Copied, Unreached
from dmltrain_launch.run.supervisor.limit import TIMEOUT_CODE
from dmltrain_launch.run.supervisor.starter import Starter


class Startup:
    """Keeps what agents get at their start: the job's key, its certificate and the folder of its logs."""

    def __init__(self, attempt: Attempt):
        self._attempt = attempt
        self._secret: tuple[str, str, str | None] = "", "", None

    def begin(self, key: str, certificate: str, log_folder: str | None, now: float) -> list[Action]:
        attempt, limits = self._attempt, self._attempt.limits
        attempt.began = now
        attempt.timeout_at, attempt.start_at = now + limits.timeout, now + limits.start
        self._secret = key, certificate, log_folder
        return attempt.preparation.begin()

    def connected(self, host: str, now: float) -> list[Action]:
        """An agent is there, also one of a host that comes to the running job, or that replaces another agent."""
        return list(self._attempt.ending.connected(host, *self._secret, now))

    def prepared(self, event: events.Event | Copied, now: float) -> list[Action]:
        """A host has finished a step."""
        attempt = self._attempt
        if attempt.ending.begun or attempt.preparation.done or attempt.ending.is_being_replaced(event.host):
            return []
        try:
            actions = attempt.preparation.handle(event)
        except LaunchError as error:
            return attempt.fail(Cause(error.code, str(error)), now)
        if isinstance(event, Copied):
            attempt.start_at = now + attempt.limits.start
        return self.fail_together(now) if attempt.verdict.faults else self._proceed(actions, now)

    def _proceed(self, actions: list[Action], now: float) -> list[Action]:
        """Start the processes if all hosts are prepared."""
        attempt = self._attempt
        if not attempt.preparation.done and attempt.hosts:
            return actions
        if attempt.check:
            return attempt.end(now)
        hosts = list(attempt.hosts.values())
        attempt.starter = Starter(attempt.job, hosts, attempt.preparation.chosen_ports)
        return [attempt.starter.start_all(host) for host in hosts]

    def started(self, event: events.Started) -> None:
        attempt = self._attempt
        attempt.processes[event.task].pid = event.pid
        if attempt.tasks.started:
            attempt.start_at = math.inf

    def unreached(self, event: Unreached, now: float) -> list[Action]:
        attempt, host = self._attempt, event.host
        if attempt.ending.is_being_replaced(host):
            attempt.ending.left[host] = None
            return []
        if attempt.check and not attempt.ending.begun:
            return self._proceed(attempt.preparation.leave_out(host, event.message, event.code), now)
        attempt.ending.unreached.add(host)
        attempt.verdict.add_fault(host, Cause(event.code, event.message))
        return self.fail_together(now)

    def refused(self, host: str, cause: Cause, now: float) -> list[Action]:
        """A host cannot do what the job needs there."""
        attempt = self._attempt
        if attempt.preparation.done or attempt.ending.begun:
            return attempt.fail(cause, now)
        attempt.verdict.add_fault(host, cause)
        attempt.verdict.wait_for_other_faults(now)
        return self.fail_together(now)

    def fail_together(self, now: float) -> list[Action]:
        """End the job, unless another host may still report a problem."""
        attempt = self._attempt
        if attempt.ending.begun or attempt.preparation.waiting_for - attempt.verdict.faults.keys():
            return []
        return attempt.fail(attempt.verdict.first_fault(attempt.hosts), now)

    def late(self, now: float) -> list[Action]:
        """The time of --start-timeout is over."""
        attempt = self._attempt
        if attempt.preparation.step == "copy":  # --start-timeout does not limit the copy
            attempt.start_at = math.inf
            return []
        waiting = attempt.preparation.waiting or attempt.tasks.not_started
        text = f"the job has not started within {attempt.limits.start:g} s (--start-timeout); waiting for {waiting}"
        return attempt.fail(Cause(TIMEOUT_CODE, text), now)
