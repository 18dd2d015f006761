"""Prepare all hosts before the first process starts. Pure.

A step begins when all hosts have finished the one before: connect (start an agent), copy (the working directory, with
--sync-dst-dir), probe (check what the job needs, find addresses; not if this machine is the only host), bind (the ports
of the scheduler and of rank 0), reach (with several hosts: connect to every address from every host). Problems are
raised as one LaunchError that names all hosts concerned. With `check` they are collected in `problems` and the
preparation continues, with one more step: measure (TCP throughput between the hosts, in rounds of pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dmltrain_launch import LaunchError, preflight
from dmltrain_launch.agent.commands import Bind, Command, Measure, Peer, Probe, Reach
from dmltrain_launch.agent.events import Bound, Measured, Probed, Reached, Ready
from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.job.host import Host, Machine
from dmltrain_launch.job.job import Job, host_of, workdir_of
from dmltrain_launch.job.role import SCHEDULER, WORKER
from dmltrain_launch.job.task import Ports
from dmltrain_launch.preflight import Problem, network
from dmltrain_launch.preflight.pairs import Throughput
from dmltrain_launch.run.supervisor.action import Action, Connect, Copy, Send
from dmltrain_launch.run.supervisor.event import Copied

STEP_TEXTS = {
    "connect": "connecting",
    "copy": "copying",
    "probe": "checking the host",
    "bind": "binding ports",
    "reach": "connecting to the other hosts",
    "measure": "measuring the throughput",
}


class Preparation:
    """The state of a job before its start. Call `handle` until `done`; then `hosts` and `ports` are complete."""

    def __init__(self, job: Job, hosts: Sequence[Host], check: bool = False):
        self.job, self.hosts, self.check = job, {host.name: host for host in hosts}, check
        self.problems: list[Problem] = []
        self.agents: dict[str, Ready] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.skews: dict[str, float] = {}  # s
        self.reached: dict[str, dict[str, dict[str, Any]]] = {}
        self.ports: dict[str, dict[str, int]] = {}
        self.throughput = Throughput()
        self._scheduler, self._master = self._ports_on(hosts)
        probes = job.over_network or check
        steps = [
            "connect",
            "copy" * bool(job.copy_to),
            "probe" * probes,
            "bind",
            "reach" * self._several,
            "measure" * (self._several and check),
        ]
        self._steps = [step for step in steps if step]
        self._waiting = set(self.hosts)

    def _ports_on(self, hosts: Sequence[Host]) -> tuple[Host | None, Host | None]:
        """The hosts that hold the ports of the scheduler and of rank 0."""
        return host_of(self.job, hosts, SCHEDULER), host_of(self.job, hosts, WORKER)

    @property
    def _several(self) -> bool:
        return len(self.hosts) > 1

    @property
    def _addresses(self) -> dict[str, str]:
        return {name: host.address for name, host in self.hosts.items()}

    @property
    def done(self) -> bool:
        return not self._steps

    @property
    def step(self) -> str:
        """The current step; "" if all are done."""
        return self._steps[0] if self._steps else ""

    @property
    def waiting_for(self) -> set[str]:
        """The hosts that have not finished the current step."""
        return self._waiting if self._steps else set()

    @property
    def waiting(self) -> str:
        """The hosts that have not finished the current step, and its name, as text."""
        return f"{', '.join(sorted(self._waiting))} ({STEP_TEXTS[self.step]})" if self._steps else ""

    @property
    def chosen_ports(self) -> Ports:
        merged: dict[str, int] = {}
        for ports in self.ports.values():
            merged.update(ports)
        return Ports(merged.get("scheduler", 0), merged.get("master", 0))

    def begin(self) -> list[Action]:
        return [Connect(name) for name in self.hosts]

    def handle(self, event: AgentEvent | Copied) -> list[Action]:
        """Note what a host has done. When all hosts have finished the step, returns the actions of the next."""
        match event:
            case Ready(host):
                self.agents[host] = event
            case Copied():
                pass
            case Probed(host, facts, skew):
                self.facts[host], self.skews[host] = facts, skew
            case Bound(host, ports):
                self.ports[host] = ports
            case Reached(host, peers):
                self.reached[host] = peers
            case Measured():
                self.throughput.take(event)
        return self._done_by(event.host)

    def leave_out(self, host: str, message: str, code: int) -> list[Action]:
        """Continue a check without a host that cannot be reached."""
        self.problems.append(Problem(host, message, code=code))
        del self.hosts[host]
        return self._done_by(host)

    def _done_by(self, host: str) -> list[Action]:
        self._waiting.discard(host)
        return [] if self._waiting or self.done else self._next()

    def _next(self) -> list[Action]:
        if self.step == "measure":
            return self._next_round()
        if self.step == "probe":
            self._judge()
            self._choose_addresses()
        elif self.step == "reach":
            self._note(preflight.paths(self._addresses, {name: self.reached[name] for name in self.hosts}))
        elif self.step == "connect":
            self.hosts = {name: self._with_agent(host) for name, host in self.hosts.items()}
        del self._steps[0]
        if not all(host.address for host in self.hosts.values()) and self.step in ("bind", "reach"):
            self._steps.clear()  # --check continues after errors, but these steps need addresses
        if self.step == "measure":
            self.throughput.begin(list(self.hosts), self.reached)
            return self._next_round()
        self._waiting = set(self.hosts)
        match self.step:
            case "copy":
                return [Copy(host.name, workdir_of(self.job, host)) for host in self.hosts.values()]
            case "probe":
                return self._send_each(lambda host: Probe(preflight.request(self.job, host)))
            case "bind":
                return self._send_each(self._ports_of)
            case "reach":
                return self._send_each(lambda host: Reach(self._others(host)))
        return []

    def _send_each(self, command: Callable[[Host], Command]) -> list[Action]:
        return [Send(host.name, command(host)) for host in self.hosts.values()]

    def _with_agent(self, host: Host) -> Host:
        agent = self.agents[host.name]
        machine = Machine.of(agent.machine) if agent.machine else None
        return replace(host, cores=agent.cores, machine=machine, python=host.python or agent.python)

    # -- probe ---------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        for name, host in self.hosts.items():
            facts = self.facts[name] = {**self.facts[name], "skew": self.skews[name]}
            self._note(preflight.problems(host, facts, preflight.request(self.job, host)), last=False)
        self._note(preflight.differences({name: self.facts[name] for name in self.hosts}))

    def _note(self, problems: Sequence[Problem], last: bool = True) -> None:
        """Add problems. The `last` of several calls raises all fatal ones together, unless this is a check."""
        self.problems += problems
        fatal = [problem for problem in self.problems if problem.fatal]
        if fatal and last and not self.check:
            raise LaunchError("\n".join(problem.text for problem in fatal), fatal[0].code)

    def _choose_addresses(self) -> None:
        interfaces = {name: facts["interfaces"] for name, facts in self.facts.items()}
        reached = {name: agent.reached for name, agent in self.agents.items()}
        hosts = list(self.hosts.values())
        try:
            chosen = network.choose(hosts, interfaces, self.job.interface, self.job.subnet, reached)
        except LaunchError as error:
            return self._note([Problem("", str(error), code=error.code)])
        for name, (address, interface) in chosen.items():
            self.hosts[name] = replace(self.hosts[name], address=address, interface=interface)

    # -- bind and reach ------------------------------------------------------------------------------------------

    def _ports_of(self, host: Host) -> Bind:
        return Bind(
            host.address,
            reach=self._several,
            throughput=self._several and self.check,
            scheduler=self.job.port if self._scheduler and host.name == self._scheduler.name else None,
            master=0 if self._master and host.name == self._master.name and self.job.torch_env else None,
        )

    def _others(self, host: Host) -> tuple[Peer, ...]:
        return tuple(self._peer(name, "reach") for name in self.hosts if name != host.name)

    def _peer(self, name: str, purpose: str) -> Peer:
        return Peer(name, self.hosts[name].address, self.ports[name][purpose])

    # -- measure -------------------------------------------------------------------------------------------------

    def _next_round(self) -> list[Action]:
        """Start the next round of measurements; after the last one, end the step."""
        now = self.throughput.next_round()
        if not now:
            del self._steps[0]
            return []
        self._waiting = {caller for caller, _ in now}
        return [Send(caller, Measure(self._peer(peer, "throughput"))) for caller, peer in now]
