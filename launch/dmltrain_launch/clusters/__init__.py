"""The table of launchers. Each has a module here with a class

Cluster(options, hosts=None)                   LaunchError if the options are wrong; Released
    .hosts                                     [Host]: `hosts`, or those that the options name
    .connect(host, mark, timeout) -> Channel   start an agent for the job `mark` within `timeout` seconds (None:
                                               --connect-timeout); thread-safe; LaunchError if it fails
    .close()                                   release everything at the job's end
and, where jobs can wait in a queue (--submit), a class Queue: see `dmltrain_launch.clusters.queue`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host

if TYPE_CHECKING:
    from dmltrain_launch.channels import Channel  # --help needs none


@dataclass(frozen=True)
class Launcher:
    """A row of the table. `options` lists those that only some launchers accept, and this one does."""

    meaning: str
    options: tuple[str, ...] = ()
    over_network: bool = True  # whether processes run on other machines
    inelastic: str = ""  # why its jobs cannot be elastic
    undetached: str = ""  # why its jobs cannot live on without their launcher, and what to do
    inside: bool = False  # the launcher itself runs inside of the cluster, but with --launcher-inside no


INSIDE = ("--interface", "--subnet", "--submit", "--launcher-inside", "--queue", "--queue-wait", "--worker-gpus")
HOSTS = ("--include", "--exclude", "--interface", "--subnet")
YARN = ("--yarn-url", "--yarn-hosts")
KUBE = (
    *("--kube-namespace", "--kube-context", "--kube-template", "--kube-pods", "--kube-service-account"),
    "--kube-jobset",
)
# Each name is a module of dmltrain_launch.clusters, imported when it is used.
LAUNCHERS = {
    "local": Launcher("all processes on this machine", over_network=False),
    "ssh": Launcher(
        "hosts reached by SSH", (*HOSTS, "--ssh", "--ssh-port", "-i", "--identity", "--accept-new-host-keys")
    ),
    "mpi": Launcher(
        "hosts reached by mpirun",
        (*HOSTS, "--mpirun", "--mpirun-args"),
        inelastic="mpirun ends the job with its first lost process",
        undetached="mpirun ends the job when its launcher is lost; use --launcher ssh",
    ),
    "slurm": Launcher(
        "hosts of a Slurm allocation",
        (*HOSTS, "--slurm-args", "--slurm-server-args", "--slurm-job", "--submit", "--queue"),
        undetached="srun ends the job when its launcher is lost; use --submit, which returns at once and whose "
        "launcher runs in Slurm, and leave --detach out",
    ),
    "kubernetes": Launcher(
        "pods of Kubernetes",
        (*INSIDE, "--image", *KUBE),
        undetached="its launcher runs in a pod; use --submit, which returns at once, and leave --detach out",
        inside=True,
    ),
    "yarn": Launcher(
        "containers of Hadoop's YARN; experimental, not run against a real cluster",
        (*INSIDE, *YARN),
        undetached="its launcher runs in a container; use --submit, which returns at once, and leave --detach out",
        inside=True,
    ),
    "ray": Launcher(
        "nodes of a Ray cluster",
        (
            *HOSTS,
            "--submit",
            "--launcher-inside",
            "--address",
            "--ray-nodes",
            "--ray-resources",
            "--ray-strategy",
            "--ray-runtime-env",
            "--queue-wait",
        ),
        undetached="Ray ends the job when its launcher is lost; use --submit, which returns at once and whose launcher "
        "runs in Ray, and leave --detach out",
    ),
}


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


def make_cluster(name: str, options: object, hosts: Sequence[Host] | None = None) -> Cluster:
    """The cluster of the launcher `name`."""
    cluster: Cluster = importlib.import_module(f"dmltrain_launch.clusters.{name}").Cluster(options, hosts)
    return cluster


def launchers_with(option: str) -> list[str]:
    """The launchers that accept the option."""
    some = [name for name, row in LAUNCHERS.items() if option in row.options]
    return some or list(LAUNCHERS)


def any_with(option: str) -> str:
    """The same as text, such as "ssh, mpi or slurm"."""
    *others, last = launchers_with(option)
    return f"{', '.join(others)} or {last}" if others else last


def listing() -> str:
    """The table as text, for --help and error messages."""
    return ", ".join(f"{name} ({row.meaning})" for name, row in LAUNCHERS.items())
