"""The next incarnation of an elastic job's scheduler, when the scheduler is lost. Pure.

It starts on the host of the one before if that can be used, else on the first one that can. An agent there holds a
port for it first. Then it is started, and all agents write down where it is, for the processes of their hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain_launch.agent.commands import Bind, Scheduler
from dmltrain_launch.agent.events import Bound
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.run.supervisor.action import Action, Continue, Send
from dmltrain_launch.run.supervisor.limit import LOST_A_PEER, USAGE_CODE
from dmltrain_launch.run.supervisor.process import Process, Processes


class Succession:
    """Starts further schedulers, at most as many as the job allows.

    `binding`: the host whose agent was asked for a port, or "".
    """

    def __init__(self, job: Job):
        self._most, self._port = job.restart_scheduler, job.port
        self._started = 0
        self._next = 0  # the number of the one that waits for its port
        self.binding = ""

    @property
    def used_up(self) -> bool:
        return self._started >= self._most

    @property
    def refusal(self) -> str:
        """Why there is no next one, for the user."""
        return f"the scheduler is not started again: this would be more than --restart-scheduler {self._most}"

    def is_needed_after(self, process: Process, code: int, tasks: Processes) -> bool:
        """Whether the job needs another scheduler after `process` has exited with `code`.

        With LOST_A_PEER the scheduler itself has ended the job.
        """
        fatal = code in (0, LOST_A_PEER, USAGE_CODE)
        return self._is_scheduler(process) and not fatal and tasks.started and not tasks.workers_done

    def can_lose(self, processes: Sequence[Process]) -> bool:
        """Whether a scheduler among these processes would have a next one."""
        return not self.used_up or not any(self._is_scheduler(process) and process.runs for process in processes)

    def begin(self, lost: Process, tasks: Processes, usable: Sequence[Host]) -> tuple[str, list[Action]]:
        """Ask a host for a port for the next scheduler. Returns a text for the user, and the actions.

        There are no actions if no host can take the scheduler.
        """
        hosts = [host for host in usable if host.name == lost.task.host.name] or list(usable)
        if not hosts:
            return "the scheduler is not started again: no host is left", []
        self._started += 1
        number = tasks.all.index(lost)
        self._next, self.binding = tasks.succeed(number, hosts[0]), hosts[0].name
        port = self._port if lost.code is not None else 0  # one that is only stopped still has its port
        text = f"starting the scheduler again on {self.binding}, {self._started} of {self._most}"
        return text, [Continue(number), Send(self.binding, Bind(hosts[0].address, scheduler=port))]

    def bound(self, event: Bound, tasks: Processes, followers: Sequence[Host]) -> list[Action]:
        """The agent holds a port: start the scheduler, and tell the hosts `followers` where it is."""
        host = tasks.all[self._next].task.host
        self.binding = ""
        tasks.on_port(self._next, event.ports["scheduler"])
        where = Scheduler(tasks.ports.incarnation, host.address, tasks.ports.scheduler)
        return [Send(host.name, tasks.start_one(self._next)), *(Send(follower.name, where) for follower in followers)]

    @staticmethod
    def _is_scheduler(process: Process) -> bool:
        return process.task.role == SCHEDULER
