"""A job as a value, and its processes with their hosts, argv and environment. Pure: no I/O, no clock."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.placement import (
    Placement,
    default_workers,
    free_slots,
    gpus_of,
    host_by_host,
    place,
    spare_gpus,
    threads,
)
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.job.rule import Rule
from dmltrain_launch.secret import secrets

# The variables that describe a process's role in the job. Inherited values are never passed on.
OWNED = (
    *("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NODE_HOST"),
    *("DMLC_WORKER_ID", "DMLC_SERVER_ID", "DMLC_TASK_ID"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("DMLTRAIN_SCHEDULER_FILE", "DMLTRAIN_INCARNATION", "DMLTRAIN_AGENT_FD", "DMLTRAIN_STRAGGLERS"),
    *("DMLTRAIN_JOB", "DMLTRAIN_KEY_FILE", "DMLTRAIN_LISTEN_FD", "DMLTRAIN_HOST_NAME", "DMLTRAIN_AGENT"),
    *("DMLTRAIN_RESTART", "DMLTRAIN_ELASTIC", "DMLTRAIN_JOIN", "DMLTRAIN_WIRE", "DMLTRAIN_CERTIFICATE_FILE"),
    *("DMLTRAIN_MAX_WORKERS", "DMLTRAIN_WAIT_FOR_HOSTS", "DMLTRAIN_RESTART_SERVERS", "DMLTRAIN_LOST"),
)
MORE_WORKERS = 1024  # that may come to an elastic job while it runs; each gets a number of its own
WIRES = ("plain", "auth", "tls")

MARK = re.compile(r"[A-Za-z0-9_.-]{1,300}")  # of an attempt: no special characters of a shell


@dataclass(frozen=True)
class Setting:
    """An environment variable for the processes of `role`; "" is every role."""

    name: str
    value: str
    role: str = ""
    secret: bool = False  # never printed or recorded


@dataclass(frozen=True)
class Ports:
    """TCP ports chosen by the agents: that of this incarnation of the scheduler, and rank 0's for torch.distributed."""

    scheduler: int = 0
    master: int = 0
    incarnation: int = 1


@dataclass(frozen=True)
class Job:
    """One program in all roles. `mark` is unique to the attempt and identifies its processes."""

    name: str
    mark: str
    argv: tuple[str, ...]
    num_workers: int
    num_servers: int
    workdir: str
    settings: tuple[Setting, ...] = ()
    port: int = 0  # of the scheduler; 0 is any free one
    placement: str = "dmlc"  # see `dmltrain_launch.job.placement`
    copy_to: str = ""  # folder on every host for a copy of the launcher's working directory; "": no copy
    over_network: bool = False  # whether processes run on other machines
    interface: str = ""  # the NIC of the training network; "" is the one that all hosts share
    subnet: str = ""  # the training network, such as 10.0.0.0/24
    needs: tuple[str, ...] = ()  # modules that the script imports
    memory: Mapping[str, int] = field(default_factory=dict)  # limit in MiB by role
    torch_env: bool = True  # whether workers get the variables of torch.distributed
    wire: str = "plain"  # how the traffic of dmltrain's processes is protected
    restart: int = 0  # how often the job has been restarted
    elastic: int = 0  # the job goes on without lost workers while this many are left; 0: the first one ends it
    restart_workers: int = 0  # how many lost workers of an elastic job are replaced, at most
    restart_servers: int = 0  # how many lost servers of an elastic job are replaced, at most
    restart_scheduler: int = 0  # how often an elastic job's scheduler is started again, at most
    most_workers: int = 0  # how many workers an elastic job gets as hosts come; 0: no limit of its own
    wait_for_hosts: float = 0.0  # s that an elastic job waits for workers when it has fewer than it needs
    rules: tuple[Rule, ...] = ()  # which change its kvstore while it runs
    detach: bool = False  # its processes go on when their launcher is lost
    usage: float = 0.0  # s between two samples of what each host uses, at first; 0: none

    def __post_init__(self) -> None:
        if not self.argv:
            raise LaunchError("no program given: dmltrain-launch -n 2 -s 2 train.py ...")
        if self.num_workers < 1:
            raise LaunchError(f"-n/--num-workers is {self.num_workers}: expected 1 or more")
        if self.num_servers < 0:
            raise LaunchError(f"-s/--num-servers is {self.num_servers}: expected 0 or more")
        if not 0 <= self.port <= 65535:
            raise LaunchError(f"--port is {self.port}: expected 0 (any free port) to 65535")

    def secrets(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """Values of environment variables that must never be shown."""
        named = {setting.name for setting in self.settings if setting.secret}
        pairs = [(setting.name, setting.value) for setting in self.settings]
        return secrets([*pairs, *(pair for host in hosts for pair in host.environment)], named)

    @property
    def script(self) -> str:
        """The Python file that was given without an interpreter; "" for other programs."""
        return self.argv[0] if self.argv[0].endswith(".py") else ""


@dataclass(frozen=True)
class Task:
    """One process of a job before its start. `environment` is added to the host's environment."""

    role: str
    rank: int
    host: Host
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"


def placements(job: Job, hosts: Sequence[Host]) -> list[Placement]:
    """Role, rank and host of every process, in launch order."""
    placed = place(job.num_workers, job.num_servers, hosts, job.placement)
    return host_by_host(placed) if job.torch_env else placed


def with_workers_for(job: Job, hosts: Sequence[Host]) -> Job:
    """The job with as many workers as there is room for on `hosts`, at least -n and at most `most_workers`.

    A host takes as many as its slots=, else one for each of gpus=; else one, or any number if it is this machine.
    """
    rooms = [default_workers(host) if job.over_network else free_slots(host, 0) for host in hosts]
    for number in range(int(min(job.most_workers, sum(rooms))), job.num_workers, -1):
        with contextlib.suppress(LaunchError):  # for example, --placement dedicated may need a host for servers
            larger = replace(job, num_workers=number)
            placements(larger, hosts)
            return larger
    return job


def workdir_of(job: Job, host: Host) -> str:
    """The working directory of the processes on `host`."""
    return host.workdir or job.copy_to or job.workdir


def host_of(job: Job, hosts: Sequence[Host], role: str) -> Host | None:
    """The host of the first process of `role`; None if there is no such process."""
    return next((host for each, _, host in placements(job, hosts) if each == role), None)


def tasks(job: Job, hosts: Sequence[Host], ports: Ports) -> tuple[Task, ...]:
    """Every process of `job` on `hosts`, in launch order."""
    placed = placements(job, hosts)
    share = threads([host for role, _, host in placed if role == WORKER])
    return tuple(
        Task(role, rank, host, _argv(job, host), _environment(job, placed, role, rank, host, ports, share, devices))
        for role, rank, host in placed
        for devices in [gpus_of(placed, rank, host) if role == WORKER else ()]
    )


def replacement(
    job: Job, task: Task, host: Host, current: Sequence[Task], running: Sequence[Task], ports: Ports
) -> Task:
    """The task that replaces the lost worker or server `task`, on its host or another one.

    `current`: the newest task of each role and rank. `running`: the tasks that run or wait for their start. On another
    host the worker gets the environment that it would have had there, with devices that no running worker has if any.
    """
    if host.name == task.host.name:
        return replace(task, environment={**task.environment, "DMLTRAIN_JOIN": "1"})
    placed = [(each.role, each.rank, host if each is task else each.host) for each in current]
    if task.role == SERVER:
        environment = _environment(job, placed, SERVER, task.rank, host, ports, {}, ())
        return Task(SERVER, task.rank, host, _argv(job, host), {**environment, "DMLTRAIN_JOIN": "1"})
    return _joining(job, placed, task.rank, host, task, running, ports)


def successor(job: Job, task: Task, host: Host, current: Sequence[Task], lost: Sequence[Task], ports: Ports) -> Task:
    """The task of the scheduler that takes the place of the lost scheduler `task`; `current` as for `replacement`.

    The new scheduler does not wait for the workers and servers that are `lost`.
    """
    placed = [(task.role, task.rank, host if task.role == SCHEDULER else task.host) for task in current]
    environment = _environment(job, placed, SCHEDULER, task.rank, host, ports, {}, ())
    if lost:
        environment["DMLTRAIN_LOST"] = ",".join(f"{task.role}:{task.rank}" for task in lost)
    return Task(SCHEDULER, task.rank, host, _argv(job, host), environment)


def newcomer(job: Job, rank: int, host: Host, current: Sequence[Task], running: Sequence[Task], ports: Ports) -> Task:
    """The task of one more worker of a running elastic job; `current` and `running` as for `replacement`."""
    placed = [*((task.role, task.rank, task.host) for task in current), (WORKER, rank, host)]
    other = next(task for task in current if task.role == WORKER)
    return _joining(job, placed, rank, host, other, running, ports)


def _joining(
    job: Job, placed: Sequence[Placement], rank: int, host: Host, other: Task, running: Sequence[Task], ports: Ports
) -> Task:
    """The task of a worker that joins. The variables of torch.distributed that name rank 0 are those of `other`."""
    share = threads([placement[2] for placement in placed if placement[0] == WORKER])
    taken = [_devices(task) for task in running if task.role == WORKER and task.host.name == host.name]
    environment = _environment(job, placed, WORKER, rank, host, ports, share, spare_gpus(host, taken))
    master = {name: other.environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in other.environment}
    return Task(WORKER, rank, host, _argv(job, host), {**environment, **master, "DMLTRAIN_JOIN": "1"})


def _devices(task: Task) -> tuple[str, ...]:
    return tuple(task.environment.get("CUDA_VISIBLE_DEVICES", "").split(","))


def _argv(job: Job, host: Host) -> tuple[str, ...]:
    return (host.python, *job.argv) if job.script else job.argv


def _environment(
    job: Job,
    placed: Sequence[Placement],
    role: str,
    rank: int,
    host: Host,
    ports: Ports,
    share: Mapping[str, int],
    devices: Sequence[str],
) -> dict[str, str]:
    local = [placement for placement in placed if placement[0] == WORKER and placement[2] == host]
    values = _defaults(role, host, share.get(host.name, 1))
    if devices:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    values.update((setting.name, setting.value) for setting in job.settings if setting.role in ("", role))
    values.update(host.environment)
    values.update(_contract(job, placed, role, rank, host, ports))
    if role == WORKER and job.torch_env:
        groups = list(dict.fromkeys(placement[2].name for placement in placed if placement[0] == WORKER))
        values.update(
            MASTER_ADDR=next(placement[2].address for placement in placed if placement[:2] == (WORKER, 0)),
            MASTER_PORT=str(ports.master),
            RANK=str(rank),
            WORLD_SIZE=str(job.num_workers),
            LOCAL_RANK=str(local.index((role, rank, host))),
            LOCAL_WORLD_SIZE=str(len(local)),
            GROUP_RANK=str(groups.index(host.name)),
            GROUP_WORLD_SIZE=str(len(groups)),
            NODE_RANK=str(groups.index(host.name)),
        )
    return values


def _defaults(role: str, host: Host, threads: int) -> dict[str, str]:
    """Defaults that the user may override. `threads`: of each worker on the host."""
    values = {
        "OMP_NUM_THREADS": str(threads if role == WORKER else 1),  # else every worker would use all cores
        "PYTHONUNBUFFERED": "1",  # so that the log has the last output of a killed process
        "PYTHONFAULTHANDLER": "1",  # so that SIGABRT prints the stacks
    }
    if host.interface:
        values.update(
            DMLC_INTERFACE=host.interface,
            NCCL_SOCKET_IFNAME=f"={host.interface}",  # = requires an exact match; without it NCCL matches a prefix
            GLOO_SOCKET_IFNAME=host.interface,
        )
    return values


def _contract(job: Job, placed: Sequence[Placement], role: str, rank: int, host: Host, ports: Ports) -> dict[str, str]:
    """The variables of dmlc's protocol, and dmltrain's own."""
    values = {
        "DMLC_ROLE": role,
        "DMLC_NUM_WORKER": str(job.num_workers),
        "DMLC_NUM_SERVER": str(job.num_servers),
        "DMLC_NODE_HOST": host.address,
        "DMLC_TASK_ID": str(rank),
        "DMLTRAIN_JOB": job.mark,
        "DMLTRAIN_HOST_NAME": host.name,
        "DMLTRAIN_RESTART": str(job.restart),
    }
    if job.elastic:
        values["DMLTRAIN_ELASTIC"] = str(job.elastic)
        values["DMLTRAIN_MAX_WORKERS"] = str(job.num_workers + MORE_WORKERS)
        if job.wait_for_hosts:
            values["DMLTRAIN_WAIT_FOR_HOSTS"] = f"{job.wait_for_hosts:g}"
        if job.restart_servers:
            values["DMLTRAIN_RESTART_SERVERS"] = str(job.restart_servers)
    if job.rules:
        values["DMLTRAIN_STRAGGLERS"] = "1"
    if job.wire != "plain":
        values["DMLTRAIN_WIRE"] = job.wire
    if job.num_servers:
        values["DMLC_PS_ROOT_URI"] = placed[0][2].address
        values["DMLC_PS_ROOT_PORT"] = str(ports.scheduler)
    if ports.incarnation > 1:
        values["DMLTRAIN_INCARNATION"] = str(ports.incarnation)
    if role in (SERVER, WORKER):
        values[f"DMLC_{role.upper()}_ID"] = str(rank)
    return values
