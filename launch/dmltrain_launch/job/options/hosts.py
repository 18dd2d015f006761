"""Options: how many processes there are, on which hosts, and what a cluster's engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain_launch.job import placement
from dmltrain_launch.job.options.option import FILE, Option, changed, choice, number, option, rows, switch, text


def _workers(options: Any, value: str, name: str, environ: Mapping[str, str]) -> Any:
    least, colon, most = value.partition(":")
    options = changed(options, "num_workers", number(int, 1)(least, name))
    most_workers = number(int, options.num_workers)(most, f"{name} {least}:M, M") if colon else 0
    return changed(options, "most_workers", most_workers)


@dataclass(frozen=True)
class HostOptions:
    """See `Options`."""

    num_workers: int | None = rows(
        None,
        Option(
            ("-n", "--num-workers"),
            "N[:M]",
            "number of workers; with --elastic N:M: at least N, and up to M as there are hosts for them",
            _workers,
        ),
    )
    most_workers: int = 0  # of an elastic job, as hosts come; 0: -n N gives none
    num_servers: int | None = option(
        "N", "number of servers (default: one per worker; 0: only workers)", number(int, 0), None, short="-s"
    )
    launcher: str = ""  # "": ssh if hosts are given, else local
    hostfile: str = option(
        "FILE", "hosts file; hosts.example describes the format", text(FILE), short="-H", also="--host-file", file=True
    )
    hosts: str = option("A:2,B:4", "hosts and their slots, instead of a hosts file", text("hosts"), joined=True)
    worker_hostfile: str = option("FILE", "hosts file for the workers", text(FILE), short="-WH", file=True)
    server_hostfile: str = option(
        "FILE", "hosts file for the scheduler and the servers", text(FILE), short="-SH", file=True
    )
    include: str = option(
        "NAMES", "use only these hosts: names, ranges such as node[01-08], patterns", text("host names"), joined=True
    )
    exclude: str = option("NAMES", "do not use these hosts", text("host names"), joined=True)
    placement: str = option(
        "POLICY",
        f"which process runs on which host: {placement.listing()} (default: dmlc)",
        choice(placement.POLICIES),
        "dmlc",
    )
    interface: str = option(
        "NIC",
        "network interface for training (default: the one on the network that all hosts share)",
        text("an interface such as eth1"),
    )
    subnet: str = option("NET", "network for training, such as 10.0.0.0/24", text("a network"))
    connect_timeout: float = option(
        "SECONDS", "time limit for connecting to a host (default: 10)", number(float, 1), 10.0, reaches=True
    )
    host_ip: str = ""
    submit: bool = switch("put the job into the cluster's queue, and return", here=True)
    launcher_inside: str = option(
        "yes|no",
        "run the launcher in the cluster too, and follow its output here (default for kubernetes and yarn: yes)",
        choice(("yes", "no")),
        here=True,
    )
    queue: str = option("NAME", "queue of YARN or Kueue, or of Slurm with --submit", text("a queue"))
    queue_wait: float | None = option(  # None: as long as the cluster could ever take the job
        "SECONDS",
        "time limit for the wait for room in the cluster; then the exit code is 124 (default: no limit, but Ray must "
        "have enough nodes)",
        number(float, 0),
        None,
    )
    worker_gpus: int = option("N", "GPUs of each worker, which Kubernetes or YARN is asked for", number(int, 1), 0)
