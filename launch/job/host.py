"""A host of a job, as a value. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """The CPUs that a host may use, as `launch.agent.cores` reports them.

    Hosts with the same `boot_id` are containers or namespaces of one machine: they share the CPUs that both may use,
    and the limits (in cores) of control groups that they have in common.
    """

    boot_id: str
    cpus: tuple[int, ...]
    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Machine:
        """From what `launch.agent.cores` reports."""
        return cls(report["boot_id"], tuple(report["cpus"]), tuple(sorted(report["limits"].items())))


@dataclass(frozen=True)
class Host:
    """One host. `name` is for messages; the other fields say how to reach it and what may run there.

    `address` is its IP on the training network, "" until the agents have found it; `interface` the NIC that has it.
    `python` runs bare scripts there: "" is this Python's path where that exists, else python3.
    `slots` is how many workers, and how many servers, it takes (None: any number); `roles` which roles (empty: all).
    `gpus` are the devices that its workers share; `workdir` replaces the launcher's. `where` names its line: "hosts:3".
    `cores` is how many it may use; `machine`, once its agent has told, which ones.
    """

    name: str
    address: str = ""
    python: str = ""
    cores: int = 1
    hostname: str = ""  # what SSH connects to; "" is the name
    user: str = ""
    port: int = 0  # of its sshd; 0 is what the configuration says, else 22
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
