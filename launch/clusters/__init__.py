"""The one table of places a job can run on. A cluster is a module with

Cluster(options, hosts=None)                   LaunchError names what is wrong with the options
    .hosts                                     [Host]: those given, or those that the options name
    .connect(host, mark, timeout) -> Channel   start an agent for the job `mark`, within `timeout` seconds (None: as the
                                               options say); any thread may call it; LaunchError when it cannot be
    .close()                                   the job is over
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from launch.channels import Channel
from launch.job.host import Host

# name: what it is. The module of that name below launch.clusters is imported when it is chosen.
CLUSTERS = {
    "local": "all processes on this machine",
    "ssh": "hosts reached by SSH",
    "mpi": "hosts reached by mpirun",
}


class Cluster(Protocol):
    hosts: list[Host]

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> Channel: ...

    def close(self) -> None: ...


def cluster(name: str, options: object, hosts: Sequence[Host] | None = None) -> Cluster:
    """A cluster of the kind `name`."""
    return importlib.import_module(f"launch.clusters.{name}").Cluster(options, hosts)


def listing() -> str:
    """The table in words, for --help and for errors."""
    return ", ".join(f"{name} ({meaning})" for name, meaning in CLUSTERS.items())
