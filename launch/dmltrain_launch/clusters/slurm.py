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
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.engine import Engine, bridge_command, choice
from dmltrain_launch.channels.bridges.runs import BridgedCluster
from dmltrain_launch.clusters import Released
from dmltrain_launch.clusters.queue import SUBMITTED, Inside, Submitted, refusal
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.allocation import allocation
from dmltrain_launch.job.hosts.selection import select
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.own_program import own_program

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
ASK_SECONDS = 60.0
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
    from dmltrain_launch.clusters import ssh

    chosen = ssh.hosts_of(options)
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


def components_of(options: Options, environ: Mapping[str, str]) -> list[str]:
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

    def __init__(self, options: Options, hosts: Sequence[Host] | None = None):
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


# -- --submit: a script of sbatch starts the launcher in its allocation ------------------------------------------------

REFUSED = {
    re.compile("--signal=R?B:"): "would end the launcher: leave B: out, so that the job's processes get the signal",
    re.compile("--gpus-per-task"): "counts tasks of srun, and the launcher has one on each node: ask for the GPUs of a "
    "node with --slurm-args=--gpus-per-node=N; its workers divide them",
}
# what sbatch says: what to do
FIXES = {
    "Requested node configuration is not available": "no node has what --slurm-args ask for, or not enough have: "
    "`sinfo -N -o '%N %P %c %m %G'` prints CPUs, memory (MB) and GPUs of each node",
    "invalid partition specified": "`sinfo -o %P` prints the partitions",
    "not permitted to use this partition": "`scontrol show partition` prints who may use which (AllowGroups); choose "
    "another one with --slurm-args=--partition=NAME, or ask the cluster's administrators",
}


class Queue:
    """See `dmltrain_launch.clusters.queue`. Without --nodes in --slurm-args a job asks for one node for each worker,
    and without it in --slurm-server-args, if these are given, for one more for each server."""

    def artefact(self, job: Inside) -> list[str]:
        argv, script = sbatch(job)
        return [f"{shlex.join(argv)} << 'END'", *script.splitlines(), "END"]

    def submit(self, job: Inside) -> Submitted:
        text = _answer(*sbatch(job)).strip().partition(";")[0]
        if not text.isdecimal():
            raise LaunchError(f"sbatch --parsable printed {text!r}: expected the number of a job")
        where = f"in Slurm's queue, as its job {text}; it will print to {job.path}/slurm-{text}.out"
        return Submitted({"slurm_job": int(text)}, where)

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        number = record.get("slurm_job")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise LaunchError(f"{where}: slurm_job is {number!r}: expected a whole number, 1 or more")
        return Held(number)


@dataclass(frozen=True)
class Held:
    """Slurm's job of this number."""

    number: int

    @property
    def lives(self) -> bool:
        return bool(self._found())

    def state(self) -> list[str]:
        found = self._found()
        words = found.split(None, 1) or ["has ended"]
        whole = [f"Slurm's job {self.number} {'is ' if found else ''}{words[0]}", *(f"({word})" for word in words[1:])]
        return [" ".join(whole)]

    def _found(self) -> str:
        """Its state and the reason for it, of the component that has one; "" if Slurm knows it no more."""
        asked = ("squeue", "--noheader", f"--jobs={self.number}", "--format=%T %r")
        lines = _answer(asked, allowed="Invalid job id").splitlines()
        return min(lines, key=lambda line: line.endswith(" None"), default="").strip()

    def cancel(self) -> None:
        _answer(("scancel", str(self.number)), allowed="Invalid job id")


def sbatch(job: Inside) -> tuple[tuple[str, ...], str]:
    """argv of sbatch, and the script that it reads from its standard input. Pure."""
    options = job.options
    for name, arguments in (("args", options.slurm_args), ("server-args", options.slurm_server_args)):
        for argument in arguments:
            for sign, why in REFUSED.items():
                if sign.match(argument):
                    raise LaunchError(f"--slurm-{name}={argument} {why}")
    output = str(job.path.absolute()).replace("%", "%%") + "/slurm-%j.out"
    own = [f"--job-name={job.name}", f"--nodes={options.num_workers}", f"--output={output}", "--open-mode=append"]
    own += [f"--partition={options.queue}"] if options.queue else []
    servers = options.num_workers if options.num_servers is None else options.num_servers
    if options.slurm_server_args and not servers:
        raise LaunchError("--slurm-server-args needs servers, and this job has none: remove it, or -s 0")
    second = [":", f"--job-name={job.name}", f"--nodes={servers}", *options.slurm_server_args]
    launcher = [
        *own_program(sys.executable, "dmltrain_launch.cli"),
        "--job",
        job.name,
        "--log-dir",
        str(job.path),
        *job.argv,
    ]
    script = f"#!/bin/sh\nexport {SUBMITTED}=1\nexec {shlex.join(launcher)}\n"
    first = ("sbatch", "--parsable", *own, *options.slurm_args)
    return (*first, *(second if options.slurm_server_args else ())), script


def _answer(argv: Sequence[str], stdin: str = "", allowed: str = "") -> str:
    """The standard output of a command of Slurm; LaunchError if it fails, other than with the words `allowed`."""
    try:
        ran = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=ASK_SECONDS)
    except FileNotFoundError:
        raise LaunchError(f"{argv[0]} is not installed here: use a machine of the Slurm cluster", 127) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]} does not run: {error}", 126) from None
    if ran.returncode and not (allowed and allowed in ran.stderr):
        said = ran.stderr.strip() or "nothing"
        raise LaunchError(f"{argv[0]} exited with {ran.returncode} and printed\n{said}{refusal(said, FIXES)}")
    return ran.stdout
