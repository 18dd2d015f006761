"""A job as a value; task.py has its processes. Pure: no I/O, no clock."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.placement import Placement, default_workers, free_slots, host_by_host, place
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
    torch_backend: str = ""  # that the script gets in place of its own; "": its own
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
