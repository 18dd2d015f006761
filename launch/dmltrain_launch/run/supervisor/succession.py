"""The next incarnation of an elastic job's scheduler, when the scheduler is lost. Pure.

It starts on the host of the one before if that can be used, else on the first one that can. An agent there holds a
port for it first. Then it is started, and all agents write down where it is, for the processes of their hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from dmltrain_launch.agent.commands import Bind, Scheduler
from dmltrain_launch.agent.events import Bound, Refused
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.run.supervisor.action import Action, Continue, Send
from dmltrain_launch.run.supervisor.event import Event
from dmltrain_launch.run.supervisor.limit import LOST_A_PEER, USAGE_CODE
from dmltrain_launch.run.supervisor.policy import Policy
from dmltrain_launch.run.supervisor.process import Process, Processes
from dmltrain_launch.run.supervisor.starter import Starter


class Succession:
    """Starts further schedulers, at most as many as the policy allows. `port`: the one that the user wants; 0: any.

    `binding`: the host whose agent was asked for a port, or "".
    """

    def __init__(self, policy: Policy, port: int):
        self._policy, self._most, self._port = policy, policy.schedulers, port
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
        return self.may_follow(process, tasks) and not fatal and not tasks.workers_done

    def may_follow(self, process: Process, tasks: Processes) -> bool:
        """Whether `process` is a scheduler after which another one may be started, if the policy allows one more."""
        return self._policy.goes_on and process.task.role == SCHEDULER and tasks.started

    def can_lose(self, processes: Sequence[Process]) -> bool:
        """Whether a scheduler among these processes would have a next one."""
        return not self.used_up or not any(process.task.role == SCHEDULER for process in processes if process.runs)

    def begin(self, lost: Process, starter: Starter, usable: Sequence[Host]) -> tuple[str, list[Action]]:
        """Ask a host for a port for the next scheduler. Returns a text for the user, and the actions.

        There are no actions if no host can take the scheduler.
        """
        hosts = [host for host in usable if host.name == lost.task.host.name] or list(usable)
        if not hosts:
            return "the scheduler is not started again: no host is left", []
        self._started += 1
        number = starter.processes.all.index(lost)
        self._next, self.binding = starter.succeed(number, hosts[0]), hosts[0].name
        port = self._port if lost.code is not None else 0  # one that is only stopped still has its port
        text = f"starting the scheduler again on {self.binding}, {self._started} of {self._most}"
        return text, [Continue(number), Send(self.binding, Bind(hosts[0].address, scheduler=port))]

    def awaits(self, event: Event) -> TypeGuard[Bound | Refused]:
        """Whether this is the answer of the host that was asked for a port."""
        if isinstance(event, Bound) and "scheduler" not in event.ports:
            return False
        return isinstance(event, (Bound, Refused)) and event.host == self.binding

    def bound(self, event: Bound, starter: Starter, followers: Sequence[Host]) -> list[Action]:
        """The agent holds a port: start the scheduler, and tell the hosts `followers` where it is."""
        host = starter.processes.all[self._next].task.host
        self.binding = ""
        starter.on_port(self._next, event.ports["scheduler"])
        where = Scheduler(starter.ports.incarnation, host.address, starter.ports.scheduler)
        return [starter.start(self._next), *(Send(follower.name, where) for follower in followers)]
