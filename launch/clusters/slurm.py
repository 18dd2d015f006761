"""Hosts of a Slurm allocation: one job step starts a bridge on each host, which connects back to the launcher.

Settings of srun and their reasons. A step has one task on each host, all CPUs of the allocation there and all its
memory (`--mem=0`); its tasks are not bound to cores, because the job's processes would inherit the bridge's. Options
that the script of sbatch has set for its own steps do not count: `REMOVED`. srun does not end other hosts' bridges when
a host fails (`--no-kill`), because the launcher decides that; it does when a bridge cannot reach the launcher
(`--kill-on-bad-exit`). A step for one host, to reconnect, overlaps the first one, which has all resources; and so does
the first one if the launcher runs in a step itself. Task numbers follow Slurm's order of hosts, so a bridge finds its
number by the name of its host. Slurm sends the signal of its option --signal to all processes of a step at once. All
ignore SIGUSR1 but the agents, which take it for a notice, and programs that handle it. (Slurm's own connections are
authenticated, and not encrypted.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial

from launch import LaunchError
from launch.channels.bridges.engine import Engine, bridge_command, choice
from launch.channels.bridges.runs import BridgedCluster
from launch.clusters import Released
from launch.job.host import Host
from launch.job.hosts.allocation import allocation
from launch.job.hosts.selection import select
from launch.job.options import Options

STEP = (
    "--ntasks-per-node=1",
    "--mem=0",
    "--cpu-bind=none",
    "--export=ALL",
    "--input=none",
    "--chdir=/",
    "--no-kill",
    "--kill-on-bad-exit=1",
    "--wait=0",
    "--mpi=none",
    "--job-name=dmltrain",
)
# srun takes options of its environment. These are for the steps of a script, and would change this one.
OPTIONS = (
    "NTASKS NPROCS NTASKS_PER_NODE NTASKS_PER_CORE NTASKS_PER_SOCKET CPUS_PER_TASK DISTRIBUTION THREADS TIMELIMIT "
    "MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE EXACT EXCLUSIVE NNODES JOB_NUM_NODES LABELIO HINT THREADS_PER_CORE CORE_SPEC "
    "IMMEDIATE MULTI_PROG GPUS_PER_TASK GPUS_PER_SOCKET NTASKS_PER_GPU"
)
REMOVED = tuple(f"{prefix}_{name}" for name in OPTIONS.split() for prefix in ("SLURM", "SRUN"))
ASK_SECONDS = 30.0
UNREACHABLE = re.compile(r"Node failure|Communication connection failure|Socket timed out|Unable to contact slurm")
HARMLESS = re.compile("configuration lacks support for cpu binding")
BUSY = re.compile("Requested nodes are busy|Job step creation temporarily disabled")
BUSY_FIX = "Another step of this allocation has all its CPUs: end it, or start it with srun --overlap"
OUTSIDE = re.compile("Requested node configuration is not available|Invalid node name")
OUTSIDE_FIX = "A job has only the nodes of its allocation: scontrol show job {job} lists them"
GPUS = re.compile("generic resource")
GPUS_FIX = (
    "The allocation has fewer of them: leave --gres and --gpus out of --slurm-args, as the job has all GPUs of its "
    "allocation, and ask salloc or sbatch for more"
)
START = "dmltrain launch --launcher slurm -n 2 ..."
HOW = f"run `salloc -N 2 {START}`, or `{START}` in a script for sbatch"


def hosts_of(options: Options, nodes: str) -> list[Host]:
    """The hosts of the allocation with these nodes, such as h[1-3], or those of them that the options name. LaunchError
    for other hosts."""
    allocated = allocation({"SLURM_JOB_NODELIST": nodes})
    names = {host.name for host in allocated}
    if not options.names_hosts:
        return select(allocated, options.include, options.exclude)
    from launch.clusters import ssh

    found = ssh.hosts_of(options)
    for host in found:
        where = f"{host.where}: " if host.where else ""
        if host.target not in names:
            raise LaunchError(
                f"{where}{host.target} is not in this allocation, which has {nodes}: use the names of Slurm's nodes"
            )
        if host.user or host.port:
            raise LaunchError(f"{where}srun takes no user and no port for {host.target}: remove them there")
    return found


def nodes_of(options: Options, environ: Mapping[str, str]) -> str:
    """The nodes of the allocation, such as h[1-3]. LaunchError if there is none, Released if that of the options has
    ended."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not options.slurm_job:
        if not nodes:
            raise LaunchError(f"--launcher slurm needs an allocation of Slurm, and there is none here: {HOW}")
        return nodes
    asks = ["squeue", "--noheader", f"--jobs={options.slurm_job}", "--states=RUNNING", "--format=%N"]
    try:
        ran = subprocess.run(asks, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--slurm-job {options.slurm_job}: squeue does not run: {error}") from None
    if ran.returncode and "Invalid job id" not in ran.stderr:
        raise LaunchError(f"--slurm-job {options.slurm_job}: squeue failed: {ran.stderr.strip()}")
    if not ran.stdout.strip():
        raise Released(f"Slurm's job {options.slurm_job} has ended, or does not run yet (squeue --me lists yours)")
    return ran.stdout.strip()


def command(arguments: Sequence[str], job: str, shares: bool, hosts: Sequence[Host], again: bool = False) -> list[str]:
    """argv of the srun that starts a bridge on each of `hosts`. `shares`: another step may have the resources of the
    allocation `job`. Pure."""
    count, names = len(hosts), ",".join(host.target for host in hosts)
    overlap = ["--overlap"] if again or shares else []
    cases = "".join(f"{host.target}) {choice(host, index).rstrip('; ')};; " for index, host in enumerate(hosts))
    return [
        *(
            "srun",
            *arguments,
            f"--jobid={job}",
            f"--nodes={count}",
            f"--ntasks={count}",
            f"--nodelist={names}",
            *STEP,
            *overlap,
        ),
        *bridge_command(f"trap '' USR1; case \"$SLURMD_NODENAME\" in {cases}esac; "),
    ]


class Cluster(BridgedCluster):
    """See `launch.clusters`."""

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
        if not shutil.which("srun"):
            raise LaunchError("srun is not installed here: start the job on a machine of the Slurm cluster", 127)
        nodes = nodes_of(options, os.environ)
        chosen = hosts_of(options, nodes) if hosts is None else list(hosts)
        job = str(options.slurm_job or os.environ.get("SLURM_JOB_ID", ""))
        shares = bool(options.slurm_job) or "SLURM_STEP_ID" in os.environ
        engine = Engine(
            "srun",
            partial(command, () if options.submit else options.slurm_args, job, shares),
            "srun --overlap -w {host} hostname",
            removed=REMOVED,
            unreachable=UNREACHABLE,
            harmless=HARMLESS,
            fixes={BUSY: BUSY_FIX, GPUS: GPUS_FIX, OUTSIDE: OUTSIDE_FIX.format(job=job)},
        )
        super().__init__(engine, chosen, options.host_ip, options.connect_timeout)
