"""A host of a job, as a value. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """The CPUs that a host may use, as `dmltrain_launch.agent.host.cores` reports them.

    Hosts with the same `boot_id` are containers or namespaces of one machine. They share the CPUs that both may use
    and the limits (in cores) of common control groups.
    """

    boot_id: str
    cpus: tuple[int, ...]
    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Machine:
        """From a report of `dmltrain_launch.agent.host.cores`."""
        return cls(report["boot_id"], tuple(report["cpus"]), tuple(sorted(report["limits"].items())))


@dataclass(frozen=True)
class Host:
    """One host: its name for messages, how to reach it, and what may run there.

    `address`: its IP on the training network, "" until the agents have found it; `interface`: its NIC.
    `python`: runs scripts without an interpreter; "" is this Python's path if it exists there, else python3.
    `slots`: the most workers, and the most servers (None: no limit). `roles`: the roles that it takes (empty: all).
    `gpus`: the devices that its workers share. `workdir`: replaces the launcher's. `where`: its line, "hosts:3".
    `cores`: how many it may use. `machine`: which ones, once its agent has reported them.
    """

    name: str
    address: str = ""
    python: str = ""
    cores: int = 1
    hostname: str = ""  # that SSH connects to; "" is the name
    user: str = ""
    port: int = 0  # of its sshd; 0: from the SSH configuration, else 22
    slots: int | None = None
    roles: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    workdir: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    interface: str = ""
    where: str = ""
    machine: Machine | None = None

    @property
    def target(self) -> str:
        """The name that SSH connects to."""
        return self.hostname or self.name


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which h2 comes before h10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", name)]
