"""The workers and servers that an elastic job has lost. Pure.

The scheduler decides who goes on. It ends with another code than 0 when too few workers are left, or no server. This
module has only what the launcher has seen of a loss. The launcher announces it at once, keeps it for the record, and
names it as the cause if the job fails later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dmltrain_launch.job.role import SERVER, WORKER
from dmltrain_launch.run.supervisor.cause import Cause
from dmltrain_launch.run.supervisor.limit import LOST_A_PEER, USAGE_CODE
from dmltrain_launch.run.supervisor.process import Process, Processes

MAY_BE_LOST = (WORKER, SERVER)
RECENT_SECONDS = 10.0  # in which the others notice a loss
STILL_SECONDS = 3.0  # since the last report of a stopped process, of which agents send one every second


class Losses:
    """`causes`: why each process was lost, in order.

    `goes_on`: whether the job may go on after a loss. `may_replace`: whether a lost server can be replaced.
    """

    def __init__(self, goes_on: bool, may_replace: Callable[[Processes], bool]):
        self._goes_on = goes_on
        self._may_replace = may_replace
        self.causes: list[Cause] = []
        self._own_at = -math.inf  # s: time of the newest loss that no other process explains
        self._stopped: dict[str, tuple[float, Cause]] = {}  # by name: when last found stopped

    def allow(self, processes: Sequence[Process], tasks: Processes) -> bool:
        """Whether the job may go on without these processes."""
        can_be_lost = all(process.task.role in MAY_BE_LOST for process in processes)
        keeps_a_server = tasks.keeps_a_server(processes) or self._may_replace(tasks)
        return self._goes_on and tasks.started and can_be_lost and keeps_a_server

    def allow_exit(self, process: Process, code: int, tasks: Processes) -> bool:
        """Whether the job may go on after this exit.

        After wrong usage it may not, because the others will exit in the same way; it may if the process joined later.
        """
        fatal = code == USAGE_CODE and not process.joins
        return code != 0 and not fatal and self.allow([process], tasks)

    def add(self, lost: Sequence[Process], cause: Cause, after: float, now: float, tasks: Processes) -> str:
        """The job goes on without `lost`, `after` s from its start. Returns what to tell the user."""
        for process in lost:
            process.lost, process.lost_after = True, after
        names = ", ".join(process.label for process in lost if process is not cause.process)
        text = f"{cause.text}; lost: {names}" if names else cause.text
        if lost and not (cause.process and cause.process.left_with_host):
            self.causes.append(self._instead(cause, now))
            self._own_at = now if cause.code != LOST_A_PEER else self._own_at
        return f"{text}; {_left(lost, tasks)} left"

    def _instead(self, cause: Cause, now: float) -> Cause:
        """The cause to note for a loss.

        A process that was stopped for too long exits with LOST_A_PEER once it runs again: then the stop is the cause.
        """
        if cause.process and cause.code == LOST_A_PEER:
            return self._stopped_now(now).get(cause.process.task.name, cause)
        return cause

    def add_stopped(self, process: Process, cause: Cause, now: float) -> bool:
        """A process is stopped: the scheduler may remove it, or it goes on. Returns whether that is new."""
        new = process.task.name not in self._stopped_now(now)
        self._stopped[process.task.name] = now, cause
        return new

    def _stopped_now(self, now: float) -> dict[str, Cause]:
        return {name: cause for name, (when, cause) in self._stopped.items() if now - when <= STILL_SECONDS}

    def first(self, now: float) -> Cause | None:
        """The cause of what followed: the first loss that no other process explains, or a stopped process."""
        return next(iter([*self._own, *self._stopped_now(now).values(), *self.causes]), None)

    @property
    def _own(self) -> list[Cause]:
        return [cause for cause in self.causes if cause.code != LOST_A_PEER]

    def explained(self, now: float) -> bool:
        """Whether a process that still runs need not be the one that others have lost."""
        return bool(self._own or self._stopped_now(now))

    def explained_now(self, now: float) -> bool:
        """Whether the process that others have lost has just ended."""
        return now - self._own_at <= RECENT_SECONDS

    def explain(self, cause: Cause) -> bool:
        """Whether the cause of the job's end is a loss, and what other processes did came after it."""
        of_lost = cause.process is not None and cause.process.task.role in MAY_BE_LOST
        return self._goes_on and (of_lost or any(known is cause for known in self.causes))


def _left(lost: Sequence[Process], tasks: Processes) -> str:
    """How many are left, of servers only if some were lost: with the verb."""
    counts = [(tasks.workers_left, WORKER)]
    if any(process.task.role == SERVER for process in lost):
        counts.append((tasks.servers_left, SERVER))
    names = " and ".join(f"{number} {role}{'' if number == 1 else 's'}" for number, role in counts)
    return f"{names} {'is' if [number for number, _ in counts] == [1] else 'are'}"
