"""All processes of a job on this machine, over the loopback interface."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.launcher import Launcher
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options

if TYPE_CHECKING:
    from dmltrain_launch.channels import Channel

LAUNCHER = Launcher("all processes on this machine", over_network=False)
LOOPBACK = "127.0.0.1"


class Cluster:
    """See `dmltrain_launch.clusters`."""

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
        if options.names_hosts:
            given = options.hostfile or options.hosts or options.worker_hostfile or options.server_hostfile
            raise LaunchError(
                f"--launcher local runs all processes on this machine, but hosts are given ({given}): "
                "remove --launcher, or use --launcher ssh, mpi or slurm"
            )
        from dmltrain_launch.agent.host.cores import report, usable  # --help needs none

        cores = usable(report())
        self.hosts = list(hosts or [Host("localhost", LOOPBACK, sys.executable, cores)])

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> Channel:
        from dmltrain_launch.channels.process import LocalChannel

        return LocalChannel(host, mark)

    def close(self) -> None:
        pass
