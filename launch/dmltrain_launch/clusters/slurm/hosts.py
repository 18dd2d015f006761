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

A heterogeneous job has an allocation of components. Of two the first has the workers and the second servers and
scheduler. One srun starts their bridges as one step, with options for each component between colons.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.engine import Engine, bridge_command, choice
from dmltrain_launch.channels.bridges.runs import BridgedCluster
from dmltrain_launch.clusters.launcher import Released
from dmltrain_launch.clusters.named_hosts import named_hosts
from dmltrain_launch.clusters.slurm import ASK_SECONDS, SlurmOptions
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.allocation import allocation
from dmltrain_launch.job.hosts.selection import select
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER

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


NODES = "SLURM_JOB_NODELIST"
ROLES = ((WORKER,), (SCHEDULER, SERVER))  # of the hosts of two components


def hosts_of(options: Options, components: Sequence[str]) -> list[Host]:
    """The hosts of the allocation with these nodes, such as h[1-3], in each component, or those of them that the
    options name. LaunchError for other hosts."""
    names = components_by_host(components)
    nodes = ",".join(components)
    if not options.names_hosts:
        if len(components) > len(ROLES):
            raise LaunchError(
                f"this allocation has {len(components)} components: expected one, or two, of which the first has the "
                "workers and the second the servers; or name hosts with -H FILE, and their roles= there"
            )
        roles = ROLES if len(components) == len(ROLES) else ((),)
        every = [Host(name, where=NODES, roles=roles[number]) for name, number in names.items()]
        return select(every, options.include, options.exclude)
    chosen = named_hosts(options)
    for host in chosen:
        where = f"{host.where}: " if host.where else ""
        if host.target not in names:
            raise LaunchError(
                f"{where}{host.target} is not in this allocation, which has {nodes}: use the names of Slurm's nodes"
            )
        if host.user or host.port:
            raise LaunchError(f"{where}srun takes no user and no port for {host.target}: remove them there")
    return chosen


def components_by_host(components: Sequence[str]) -> dict[str, int]:
    """The number of each host's component, the first one if it is in several."""
    components_of_hosts: dict[str, int] = {}
    for number, nodes in enumerate(components):
        for host in allocation({NODES: nodes}):
            components_of_hosts.setdefault(host.name, number)
    return components_of_hosts


def components_of(options: SlurmOptions, environ: Mapping[str, str]) -> list[str]:
    """The nodes of the allocation, such as h[1-3]; of a heterogeneous job those of each component. LaunchError if there
    is none, Released if that of the options has ended."""
    if not options.slurm_job:
        size = environ.get("SLURM_HET_SIZE", "")
        names = [f"{NODES}_HET_GROUP_{number}" for number in range(int(size) if size.isdecimal() else 0)]
        node_lists = [environ.get(name, "") for name in names or [NODES]]
        if not all(node_lists):
            raise LaunchError(f"--launcher slurm needs an allocation of Slurm, and there is none here: {HOW}")
        return node_lists
    asks = ["squeue", "--noheader", f"--jobs={options.slurm_job}", "--states=RUNNING", "--format=%i %N"]
    try:
        ran = subprocess.run(asks, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--slurm-job {options.slurm_job}: squeue does not run: {error}") from None
    if ran.returncode and "Invalid job id" not in ran.stderr:
        raise LaunchError(f"--slurm-job {options.slurm_job}: squeue failed: {ran.stderr.strip()}")
    if not ran.stdout.strip():
        raise Released(f"Slurm's job {options.slurm_job} has ended, or does not run yet (squeue --me lists yours)")
    return [nodes for _, nodes in sorted(map(_component, ran.stdout.splitlines()))]


def _component(line: str) -> tuple[int, str]:
    """Its number, and nodes: `17 h[1-2]`, or `17+1 h3` for the component 1 of the job 17."""
    number, _, nodes = line.strip().partition(" ")
    offset = number.partition("+")[2]
    return int(offset) if offset.isdecimal() else 0, nodes.strip()


@dataclass(frozen=True)
class Allocated:
    """The allocation `job`. `shares`: another step may have its resources. `arguments`: for the srun of each component;
    `components`: that of each host, {} if there is only one."""

    job: str
    shares: bool = False
    arguments: Sequence[Sequence[str]] = ((), ())
    components: Mapping[str, int] = field(default_factory=dict)


def command(allocated: Allocated, hosts: Sequence[Host], again: bool = False) -> list[str]:
    """argv of the srun that starts a bridge on each of `hosts`. Pure."""
    cases = "".join(f"{host.target}) {choice(host, index).rstrip('; ')};; " for index, host in enumerate(hosts))
    bridge = bridge_command(f"trap '' USR1; case \"$SLURMD_NODENAME\" in {cases}esac; ")
    overlap = ["--overlap"] if again or allocated.shares else []
    of_each: dict[int, list[str]] = {}
    for host in hosts:
        of_each.setdefault(allocated.components.get(host.target, 0), []).append(host.target)
    words: list[str] = []
    for number, names in sorted(of_each.items()):
        words += [
            *(":" for _ in words[:1]),
            *(allocated.arguments[number] if number < len(allocated.arguments) else ()),
            *([f"--het-group={number}"] if allocated.components else []),
            f"--jobid={allocated.job}",
            f"--nodes={len(names)}",
            f"--ntasks={len(names)}",
            f"--nodelist={','.join(names)}",
            *STEP,
            *overlap,
            *bridge,
        ]
    return ["srun", *words]


class Cluster(BridgedCluster):
    """See `dmltrain_launch.clusters`."""

    def __init__(self, options: SlurmOptions, hosts: Sequence[Host] | None = None):
        if not shutil.which("srun"):
            raise LaunchError("srun is not installed here: start the job on a machine of the Slurm cluster", 127)
        if options.queue and not options.submit:
            raise LaunchError(f"--queue {options.queue} is for --submit: an allocation that is there has its partition")
        components = components_of(options, os.environ)
        if options.slurm_server_args and len(components) == 1:
            raise LaunchError(
                "--slurm-server-args needs an allocation with a component for the servers: `salloc -N 2 : -N 1 ...`, "
                "or --submit"
            )
        chosen = hosts_of(options, components) if hosts is None else list(hosts)
        job = str(options.slurm_job or os.environ.get("SLURM_JOB_ID", ""))
        shares = bool(options.slurm_job) or "SLURM_STEP_ID" in os.environ
        given = ((), ()) if options.submit else (options.slurm_args, options.slurm_server_args)
        several = components_by_host(components) if len(components) > 1 else {}
        engine = Engine(
            "srun",
            partial(command, Allocated(job, shares, given, several)),
            "srun --overlap -w {host} hostname",
            removed=REMOVED,
            unreachable=UNREACHABLE,
            harmless=HARMLESS,
            fixes={BUSY: BUSY_FIX, GPUS: GPUS_FIX, OUTSIDE: OUTSIDE_FIX.format(job=job)},
        )
        super().__init__(engine, chosen, options.host_ip, options.connect_timeout)
