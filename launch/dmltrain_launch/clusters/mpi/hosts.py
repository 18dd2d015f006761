"""Hosts reached through mpirun: one mpirun starts a bridge on each host, which connects back to the launcher.

Settings of mpirun and their reasons: processes are not bound to cores, because the job's processes would inherit the
bridge's core. mpirun does not limit slots; the launcher does. The launcher's machine connects to every host itself
(`no_tree_spawn`), because often only it has the key. Host names are not cut at the first dot. `-wdir /` is used because
the launcher's folder may not exist on the hosts. (mpirun's own connections are not protected.) Set a host's user and
port in ~/.ssh/config: mpirun accepts neither.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.bridge import VARIABLE
from dmltrain_launch.channels.bridges.engine import Engine, bridge_command, choice
from dmltrain_launch.channels.bridges.runs import LOOPBACK, BridgedCluster
from dmltrain_launch.clusters.mpi import MpiOptions
from dmltrain_launch.clusters.named_hosts import named_hosts
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.allocation import allocation
from dmltrain_launch.job.hosts.selection import select
from dmltrain_launch.job.options import Options

OPEN_MPI, MPICH = "Open MPI", "MPICH"
KINDS = {OPEN_MPI: re.compile(r"Open MPI|OpenRTE|PRRTE"), MPICH: re.compile(r"HYDRA|Intel\(R\) MPI")}  # in --version
ENVIRONMENT = {
    **{"OMPI_MCA_plm_rsh_no_tree_spawn": "1", "OMPI_MCA_orte_keep_fqdn_hostnames": "1"},  # Open MPI up to 4
    **{"PRTE_MCA_plm_ssh_no_tree_spawn": "1", "PRTE_MCA_prte_keep_fqdn_hostnames": "1"},  # from 5
}
VERSION_SECONDS = 10.0
# Messages of ssh and the shell for a host that is down, and for a user error.
UNREACHABLE = re.compile("Connection (refused|timed out|reset)|No route to host|Network is unreachable")
MISTAKE = re.compile("Could not resolve hostname|Permission denied|Host key verification failed|: not found")
# Open MPI and the ssh that it starts both put that ssh into its own process group; the second to do so may be refused.
HARMLESS = re.compile(r"plm:rsh: Warning: setpgid\(")
ROOT = re.compile(r"allow-run-as-root|run(ning)? as root", re.IGNORECASE)
ROOT_FIX = (
    "With dmltrain-launch use --mpirun-args=--allow-run-as-root, "
    "or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 on this machine"
)


def kind(mpirun: str) -> str:
    """Which MPI the program `mpirun` belongs to; LaunchError if it is missing or unknown."""
    if not shutil.which(mpirun):
        raise LaunchError(
            f"{mpirun} is not installed here: install Open MPI (Debian, Ubuntu: openmpi-bin; Fedora, RHEL: openmpi) or "
            "MPICH (mpich) on every host, or give its path with --mpirun PATH",
            127,
        )
    try:
        ran = subprocess.run(
            [mpirun, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{mpirun} --version: {error}", 126) from None
    output = ran.stdout + ran.stderr
    kind_found = next((name for name, sign in KINDS.items() if sign.search(output)), None)
    if not kind_found:
        first = next(iter(output.strip().splitlines()), "nothing")
        raise LaunchError(f"{mpirun} --version printed {first!r}: expected Open MPI or MPICH (--mpirun PATH)")
    return kind_found


def check(hosts: Sequence[Host]) -> None:
    """LaunchError for a host with attributes that mpirun does not support."""
    for host in hosts:
        where = f"{host.where}: " if host.where else ""
        if host.user or host.port:
            lines = [f"User {host.user}"] * bool(host.user) + [f"Port {host.port}"] * bool(host.port)
            block = "".join(f"\n        {line}" for line in lines)
            raise LaunchError(
                f"{where}mpirun takes no user and no port for {host.target}: remove them there, and add to "
                f"~/.ssh/config\n    Host {host.target}{block}"
            )
        if re.search(r"[:,\s]", host.target) or host.target.startswith("-"):
            raise LaunchError(f"{where}mpirun does not accept the host {host.target!r}: use a name or an IPv4 address")


def command(mpirun: str, kind: str, arguments: Sequence[str], hosts: Sequence[Host], again: bool = False) -> list[str]:
    """argv of the mpirun whose process i is the bridge on hosts[i]. Pure."""
    if kind == OPEN_MPI:
        whole = ["--bind-to", "none", "--oversubscribe"]
        each = [["-np", "1", "-host", f"{host.target}:1", "-wdir", "/", "-x", VARIABLE] for host in hosts]
    else:
        whole = ["-genvlist", VARIABLE, "-hosts", ",".join(f"{host.target}:1" for host in hosts)]
        each = [["-np", "1", "-wdir", "/"]] * len(hosts)
    argv = [mpirun, *arguments, *whole]
    for index, (options, host) in enumerate(zip(each, hosts, strict=True)):
        argv += [":"] * (index > 0) + [*options, *bridge_command(choice(host, index))]
    return argv


def hosts_of(options: Options) -> list[Host]:
    """The hosts of the options, else of the batch system's allocation, else this machine. LaunchError if wrong."""
    if options.names_hosts:
        return named_hosts(options)
    allocated = allocation(os.environ)
    if not allocated and (options.include or options.exclude):
        raise LaunchError("--include and --exclude need hosts to choose from: use -H FILE or --hosts")
    return select(allocated, options.include, options.exclude) if allocated else [Host("localhost", LOOPBACK)]


def engine(mpirun: str, kind: str, arguments: Sequence[str] = ()) -> Engine:
    return Engine(
        "mpirun",
        partial(command, mpirun, kind, arguments),
        "ssh {host} true",
        environment=ENVIRONMENT,
        harmless=HARMLESS,
        unreachable=UNREACHABLE,
        mistake=MISTAKE,
        fixes={ROOT: ROOT_FIX},
    )


class Cluster(BridgedCluster):
    """See `dmltrain_launch.clusters`."""

    def __init__(self, options: MpiOptions, hosts: Sequence[Host] | None = None):
        chosen = hosts_of(options) if hosts is None else list(hosts)
        check(chosen)
        mpirun = engine(options.mpirun, kind(options.mpirun), options.mpirun_args)
        super().__init__(mpirun, chosen, options.host_ip, options.connect_timeout)
