"""A row of the table of launchers, and what the module that it names has to offer.

A launcher is a module or folder `clusters/NAME` with a row LAUNCHER. It has a class

Cluster(options, hosts=None)                   LaunchError if the options are wrong; Released
    .hosts                                     [Host]: `hosts`, or those that the options name
    .connect(host, mark, timeout) -> Channel   start an agent for the job `mark` within `timeout` seconds (None:
                                               --connect-timeout); thread-safe; LaunchError if it fails
    .close()                                   release everything at the job's end
and, where jobs can wait in a queue (--submit), a class Queue: see `dmltrain_launch.clusters.queue`. Every command
imports LAUNCHER, so what takes longer to import is in modules of the folder, which the row names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options

if TYPE_CHECKING:
    from dmltrain_launch.channels import Channel  # --help needs none

HOSTS = ("include", "exclude", "interface", "subnet")
# Decorates the class of a launcher's options. Only `dmltrain_launch.clusters.AllOptions`, which is made of all of them,
# has instances: to make the methods of each class would take every command some milliseconds.
own_options = dataclass(frozen=True, init=False, repr=False, eq=False)
IN_CLUSTER = ("interface", "subnet", "submit", "launcher_inside", "queue", "queue_wait", "worker_gpus")


@dataclass(frozen=True)
class Launcher:
    """A row of the table. `options`: the class of all its options; the fields that it adds are of this launcher alone.
    `accepts` lists those of `Options` that only some launchers accept, and this one does. `cluster`, `queue`: modules
    of the launcher's folder with its Cluster and its Queue, "": the launcher's own module; without one."""

    meaning: str
    options: type[Options] = Options
    accepts: tuple[str, ...] = ()
    cluster: str = ""
    queue: str = ""
    over_network: bool = True  # whether processes run on other machines
    inelastic: str = ""  # why its jobs cannot be elastic
    undetached: str = ""  # why its jobs cannot live on without their launcher, and what to do
    inside: bool = False  # the launcher itself runs inside of the cluster, but with --launcher-inside no

    @property
    def fields(self) -> set[str]:
        """The fields of the options that only some launchers accept, and this one does."""
        return {field.name for field in dataclasses.fields(self.options)} - COMMON | set(self.accepts)


COMMON = {field.name for field in dataclasses.fields(Options)}


class Released(LaunchError):
    """The hosts do not belong to the job any more, and nothing of it runs there."""


class Cluster(Protocol):
    hosts: list[Host]

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> Channel: ...

    def close(self) -> None: ...


@runtime_checkable
class Allocating(Protocol):
    """A cluster whose engine chooses the hosts: it has none before `allocate`."""

    def allocate(self, say: Callable[[str], None]) -> None:
        """Wait for them. `say` is called with a line for the user while the engine has no room."""

    def described(self) -> list[str]:
        """What is asked of the engine, for --dry-run."""
