"""Prepare a host that comes to a running job: the steps of prepare.py for one host, against those that it must reach.

Its processes connect to the scheduler and the servers. So the agents of those hosts listen again, while hosts come
(`PeerPorts`), and the new host's agent connects to each of them. Its address is on the network that it shares with
them. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import Bind, Peer, Start
from dmltrain_launch.agent.events import Bound
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.preflight import network
from dmltrain_launch.run.supervisor.action import Action, Send
from dmltrain_launch.run.supervisor.limit import USAGE_CODE
from dmltrain_launch.run.supervisor.prepare import Preparation


class PeerPorts:
    """While hosts come to the job: the ports on which they can reach the hosts of the scheduler and of the servers."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.ports: dict[str, int] = {}
        self._asked: set[str] = set()

    @property
    def missing(self) -> set[str]:
        """The hosts that have been asked, and have not answered."""
        return self._asked - self.ports.keys()

    def open(self) -> list[Action]:
        """Ask all of them, unless they have been asked."""
        new = [host for name, host in self.hosts.items() if name not in self._asked]
        self._asked |= {host.name for host in new}
        return [Send(host.name, Bind(host.address, reach=True)) for host in new]

    def close(self) -> list[Action]:
        """No host comes any more: the hosts of scheduler and servers stop listening."""
        asked, self._asked = self._asked, set()
        self.ports.clear()
        return [Send(name, Start((), ())) for name in sorted(asked)]

    def lost(self, name: str) -> None:
        """This host is lost: hosts that come need not reach it."""
        self.hosts.pop(name, None)
        self._asked.discard(name)
        self.ports.pop(name, None)


class LatePreparation(Preparation):
    """`main`: the preparation of the job's hosts at its start, and of those that have come since."""

    def __init__(self, job: Job, host: Host, main: Preparation, peer_ports: PeerPorts):
        self.name, self._main, self._peer_ports = host.name, main, peer_ports
        super().__init__(job, [host])

    def _ports_on(self, hosts: Sequence[Host]) -> tuple[Host | None, Host | None]:
        return None, None

    @property
    def _several(self) -> bool:
        return True

    @property
    def _addresses(self) -> dict[str, str]:
        return {name: host.address for name, host in self._peer_ports.hosts.items()}

    @property
    def host(self) -> Host:
        """What is known of it so far."""
        return self.hosts[self.name]

    def answered(self, peer: str) -> list[Action]:
        """`peer`, which this host must reach, listens now or is lost: stop waiting for it."""
        return self._done_by(peer) if self.step == "bind" and peer in self._waiting else []

    def _next(self) -> list[Action]:
        actions = super()._next()
        if self.step == "bind":
            actions += self._peer_ports.open()
            self._waiting |= self._peer_ports.missing
        return actions

    def _others(self, host: Host) -> tuple[Peer, ...]:
        peer_ports = self._peer_ports
        return tuple(Peer(name, peer_ports.hosts[name].address, port) for name, port in peer_ports.ports.items())

    def _judge(self) -> None:
        super()._judge()
        versions = {_version(facts) for facts in self._main.facts.values()} - {""}
        own = _version(self.facts[self.name])
        if own and versions and own not in versions:
            raise LaunchError(
                f"{self.name} has dmltrain {own}, and the job {', '.join(sorted(versions))}: install the same version",
                USAGE_CODE,
            )

    def _choose_addresses(self) -> None:
        peers = list(self._peer_ports.hosts.values())
        for peer in peers:
            if peer.address and ipaddress.ip_address(peer.address).is_loopback:
                raise LaunchError(
                    f"{self.name} cannot reach the job: {peer.name} has the address {peer.address}, which only its own "
                    "processes reach; start the job with --subnet, --interface or addr=",
                    USAGE_CODE,
                )
        interfaces = {peer.name: self._main.facts[peer.name]["interfaces"] for peer in peers}
        interfaces[self.name] = self.facts[self.name]["interfaces"]
        reached = {name: agent.reached for name, agent in {**self._main.agents, **self.agents}.items()}
        chosen = network.choose([*peers, self.host], interfaces, self.job.interface, self.job.subnet, reached)
        address, interface = chosen[self.name]
        self.hosts[self.name] = replace(self.host, address=address, interface=interface)


def _version(facts: Mapping[str, Any]) -> str:
    """Of dmltrain, as a probe has found it; "" if it has not."""
    packages = (facts.get("inspection") or {}).get("packages") or {}
    return str(packages.get("dmltrain") or "")


def bound(event: Bound, peer_ports: PeerPorts, preparations: Sequence[LatePreparation]) -> list[Action]:
    """A host that the coming hosts must reach listens now."""
    if event.host not in peer_ports.missing or "reach" not in event.ports:
        return []
    peer_ports.ports[event.host] = event.ports["reach"]
    return [action for preparation in preparations for action in preparation.answered(event.host)]
