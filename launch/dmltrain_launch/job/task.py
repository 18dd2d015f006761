"""The processes of a job before their start, with their hosts, argv and environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import MORE_WORKERS, Job, placements
from dmltrain_launch.job.placement import Placement, gpus_of, spare_gpus, threads
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER


@dataclass(frozen=True)
class Ports:
    """TCP ports chosen by the agents: that of this incarnation of the scheduler, and rank 0's for torch.distributed."""

    scheduler: int = 0
    master: int = 0
    incarnation: int = 1


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
    argv = (host.python, *job.argv) if job.script else job.argv
    if not job.torch_backend:
        return argv
    script = next(place for place, word in enumerate(argv) if word.endswith(".py"))
    return (*argv[:script], "-m", f"{job.torch_backend}.torch", *argv[script:])


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
