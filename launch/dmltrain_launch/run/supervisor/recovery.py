"""What the end of a process means while the job runs: the job's end, or that it goes on without the process. Pure.

The first process that fails ends the job and decides its exit code (cause.py). A process that stays stopped has failed.
When all workers have exited with 0, servers and scheduler have FINISH_SECONDS to exit.

If the job's policy says so, it goes on without workers and servers that it loses (losses.py), or replaces them
(replace.py). It fails if no worker or no server is left and none is to come. When the scheduler is lost, the job gets
the next incarnation of it (succession.py).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from dmltrain_launch.agent import events
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.run.supervisor.action import Action
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.cause import Cause
from dmltrain_launch.run.supervisor.limit import FINISH_SECONDS, LATE_SECONDS, LOST_A_PEER, as_shell
from dmltrain_launch.run.supervisor.process import Process

CANNOT_START = (126, 127)  # codes of an agent that could not start a process


class Recovery:
    """Decides for an `attempt` by its policy."""

    def __init__(self, attempt: Attempt):
        self._attempt = attempt

    # -- ends ----------------------------------------------------------------------------------------------------

    def exited(self, process: Process, code: int, now: float) -> list[Action]:
        attempt, tasks = self._attempt, self._attempt.tasks
        process.code, process.ended_by_us = code, attempt.ending.begun or process.lost
        cause = Cause(as_shell(code), process.fate, process)
        if not process.ended_by_us and attempt.succession.is_needed_after(process, code, tasks):
            return self._lose_scheduler(process, cause, now)
        if tasks.a_worker_done or not tasks.scheduler_lives:
            attempt.replacer.cancel()
        if process.ended_by_us:
            return []
        if attempt.losses.allow_exit(process, code, tasks):
            return self.lose([process], cause, now)
        if code == LOST_A_PEER and not tasks.workers_done:
            attempt.verdict.add_suspect(cause, now)
            attempt.replacer.cancel()
        elif code not in (0, LOST_A_PEER):
            return attempt.fail(cause, now)
        return self._end_if_done(now)

    def _end_if_done(self, now: float) -> list[Action]:
        attempt, tasks, losses = self._attempt, self._attempt.tasks, self._attempt.losses
        if tasks.workers_done and not attempt.policy.goes_on:
            attempt.verdict.drop_suspect()
        suspect = attempt.verdict.suspect
        if tasks.ended:
            return attempt.fail(losses.first(now) or suspect, now) if suspect else attempt.end(now)
        if suspect:
            return attempt.fail(losses.first(now) or suspect, now) if losses.explained_now(now) else []
        # a worker that left on purpose may have been the last one at the job's end: only the scheduler knows
        a_worker_left = any(worker.left for worker in tasks.workers)
        if not attempt.workers_left and not a_worker_left and (cause := losses.first(now)):
            return attempt.fail(cause, now)
        if tasks.workers_done:
            attempt.finish_at = min(attempt.finish_at, now + FINISH_SECONDS)
        elif tasks.scheduler_done and tasks.only_replacements_left:
            attempt.finish_at = min(attempt.finish_at, now + LATE_SECONDS)
        return []

    def frozen(self, event: events.Frozen, now: float) -> list[Action]:
        """A process stays stopped. When a scheduler runs again, it finds that another one has taken its place."""
        attempt, process = self._attempt, self._attempt.processes[event.task]
        text = f"{process.label} has been stopped (SIGSTOP?) for {event.seconds} s"
        cause = Cause(128 + signal.SIGSTOP, text, process)
        if process.lost:
            return []
        if attempt.succession.may_follow(process, attempt.tasks):
            return self._lose_scheduler(process, cause, now)
        if not attempt.losses.allow([process], attempt.tasks):
            return attempt.fail(cause, now)
        if attempt.tasks.scheduler_done:
            return self.lose([process], cause, now)
        if attempt.losses.add_stopped(process, cause, now):
            attempt.announce(text)
        return []

    def not_started(self, event: events.Refused, now: float) -> list[Action] | None:
        """The loss of a replacement or newcomer that its host could not start; None if it refuses something else."""
        attempt = self._attempt
        starting = attempt.tasks.starting_on(event.host)
        if not starting or event.code not in CANNOT_START or attempt.ending.begun:
            return None
        return self.lose([starting], Cause(event.code, event.message, starting), now)

    def decide(self, suspect: Cause, now: float) -> list[Action]:
        """End the job because of a process that has lost another one. Wait longer for one that may be the cause."""
        attempt = self._attempt
        late = not attempt.losses.explained(now) and any(process.may_fail for process in attempt.processes)
        if late and attempt.verdict.extend_wait(now, attempt.limits.grace):
            return []
        return attempt.fail(attempt.verdict.cause_after_suspect(attempt.losses.first(now) or suspect), now)

    # -- losses --------------------------------------------------------------------------------------------------

    def lose(self, lost: Sequence[Process], cause: Cause, now: float) -> list[Action]:
        """Go on without these processes, if a worker and a server are left or will come; else end the job."""
        schedulers = [process for process in lost if process.task.role == SCHEDULER]
        others = [process for process in lost if process not in schedulers]
        actions = [action for scheduler in schedulers for action in self._lose_scheduler(scheduler, cause, now)]
        if self._attempt.ending.begun or (schedulers and not others):
            return actions
        return [*actions, *self._lose_others(others, cause, now)]

    def _lose_others(self, lost: Sequence[Process], cause: Cause, now: float) -> list[Action]:
        attempt, tasks = self._attempt, self._attempt.tasks
        loss = attempt.losses.add(lost, cause, now - attempt.began, now, tasks)
        replanned = [] if attempt.verdict.suspect else attempt.replacer.lost(lost, tasks, attempt.usable, now)
        failed = cause.process if cause.process and cause.process.replaces else None
        attempt.announce("; ".join([loss, *replanned]), failed)
        if not attempt.workers_left and cause.code == LOST_A_PEER:
            attempt.verdict.add_suspect(cause, now)
        elif not attempt.workers_left:
            return attempt.fail(attempt.losses.first(now) or cause, now)
        elif not attempt.servers_left:
            return attempt.fail(cause, now)
        return self._end_if_done(now)

    def can_lose(self, host: str) -> bool:
        """Whether the job may go on without the processes of this host."""
        attempt, here = self._attempt, self._attempt.tasks.on(host)
        if not attempt.losses.allow([process for process in here if process.task.role != SCHEDULER], attempt.tasks):
            return False
        if not (can := attempt.succession.can_lose(here)):
            attempt.announce(attempt.succession.refusal)
        return can

    def lose_host(self, host: str, cause: Cause, now: float) -> list[Action]:
        """Go on without the processes that still run on a host."""
        attempt, tasks = self._attempt, self._attempt.tasks
        attempt.ending.given_up.add(host)
        attempt.verdict.silent.pop(host, None)
        for text in attempt.replacer.host_lost(host, tasks, attempt.usable, now):
            attempt.announce(text)
        return self.lose([process for process in tasks.on(host) if process.runs], cause, now)

    # -- the scheduler -------------------------------------------------------------------------------------------

    def _lose_scheduler(self, process: Process, cause: Cause, now: float) -> list[Action]:
        """Go on with another scheduler; end the job if there cannot be one."""
        attempt, succession = self._attempt, self._attempt.succession
        if succession.used_up:
            return attempt.fail(replace(cause, text=f"{cause.text}; {succession.refusal}"), now)
        loss = attempt.losses.add([process], cause, now - attempt.began, now, attempt.tasks)
        text, actions = succession.begin(process, attempt.starter, attempt.usable)
        if not actions:
            return attempt.fail(replace(cause, text=f"{cause.text}; {text}"), now)
        attempt.announce(f"{loss}; {text}", process if process.replaces else None)
        return actions

    def next_scheduler(self, event: events.Bound | events.Refused, now: float) -> list[Action]:
        """The host that was asked for a port for the next scheduler has answered."""
        attempt = self._attempt
        if isinstance(event, events.Bound):
            return attempt.succession.bound(event, attempt.starter, self._followers)
        return attempt.fail(Cause(event.code, f"the scheduler cannot be started again: {event.message}"), now)

    @property
    def _followers(self) -> list[Host]:
        """The hosts whose processes must know where the scheduler is: also hosts whose workers are leaving."""
        ending = self._attempt.ending
        running = [process.task.host.name for process in self._attempt.processes if process.runs]
        leave = {name for name in running if ending.has_agent(name)}
        return [host for name, host in self._attempt.hosts.items() if ending.is_usable(name) or name in leave]
