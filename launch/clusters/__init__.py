"""The table of launchers. A cluster is a module with

Cluster(options, hosts=None)                   LaunchError names what is wrong with the options
    .hosts                                     [Host]: those given, or those that the options name
    .connect(host, mark, timeout) -> Channel   start an agent for the job `mark`, within `timeout` seconds (None: as the
                                               options say); any thread may call it; LaunchError when it cannot be
    .close()                                   the job is over
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from launch.job.host import Host

if TYPE_CHECKING:
    from launch.channels import Channel  # --help needs none


@dataclass(frozen=True)
class Launcher:
    """A row of the table. `options` are those that it has a use for, of the options that not all launchers have."""

    meaning: str
    options: tuple[str, ...] = ()
    over_network: bool = True  # whether the hosts are others than this machine


HOSTS = ("--include", "--exclude", "--interface", "--subnet")
# The module of that name below launch.clusters is imported when it is chosen.
LAUNCHERS = {
    "local": Launcher("all processes on this machine", over_network=False),
    "ssh": Launcher(
        "hosts reached by SSH", (*HOSTS, "--ssh", "--ssh-port", "-i", "--identity", "--accept-new-host-keys")
    ),
    "mpi": Launcher("hosts reached by mpirun", (*HOSTS, "--mpirun", "--mpirun-args")),
}


class Cluster(Protocol):
    hosts: list[Host]

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> Channel: ...

    def close(self) -> None: ...


def cluster(name: str, options: object, hosts: Sequence[Host] | None = None) -> Cluster:
    """A cluster of the kind `name`."""
    made: Cluster = importlib.import_module(f"launch.clusters.{name}").Cluster(options, hosts)
    return made


def those_with(option: str) -> list[str]:
    """The launchers that have a use for the option; all, when it is none that only some have."""
    some = [name for name, row in LAUNCHERS.items() if option in row.options]
    return some or list(LAUNCHERS)


def listing() -> str:
    """The table as text, for --help and for errors."""
    return ", ".join(f"{name} ({row.meaning})" for name, row in LAUNCHERS.items())
