"""The environment variables that a launcher sets (docs/environment.md): dmlc's DMLC_* and dmltrain's own DMLTRAIN_*.

No other module of this package reads os.environ.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError

TRANSPORTS = ("auto", "tcp", "shm")
HOST_SUMS = ("auto", "off")
SERVER_SHARES = ("equal", "links")
WIRES = ("plain", "auth", "tls")
CHOICES = {"transport": TRANSPORTS, "host_sum": HOST_SUMS, "server_shares": SERVER_SHARES}  # by field of Environment
UNLIMITED = 1e8  # s, of a wait
ROLES = ("scheduler", "server", "worker")
OF_MPI = {  # torchrun's variable -> those of MPICH and Intel, Open MPI, MVAPICH
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}


@dataclass(frozen=True)
class Environment:
    """What a process knows about its job. `index` counts within the role, in launch order."""

    role: str = "worker"
    index: int = 0
    num_workers: int = 1
    num_servers: int = 0
    root_host: str = "127.0.0.1"
    root_port: int = 0
    node_host: str = "127.0.0.1"  # own address on the training network
    host_name: str = ""  # for messages
    job: str = ""
    key: bytes = b""  # secret shared by the job's processes; empty: connections are not authenticated
    listen_fd: int | None = None  # scheduler: an inherited socket bound to root_port
    heartbeat_seconds: float = 1.0  # between two heartbeats
    lost_seconds: float = 8.5  # silence after which a process counts as lost
    start_seconds: float = 120.0  # time limit for all processes of the job to register
    wait_seconds: float = 600.0  # longest wait for another worker's gradient or at a barrier
    update_on_kvstore: bool | None = None  # dist_sync with the optimizer on the servers (MXNET_UPDATE_ON_KVSTORE);
    #                                        None: not set, the backend's default holds
    transport: str = "auto"  # how a worker reaches servers: "tcp", "shm" (shared memory), "auto": shm on the same host
    server_shares: str = "equal"  # of weights on servers; "links": by the measured speed of the hosts' links
    host_sum: str = "auto"  # "auto": with dist_sync, a host's gradients are summed there before they go to other hosts
    wire: str = "plain"  # how TCP connections are protected (docs/security.md): "plain": control frames are
    #                      authenticated; "auth": all frames are; "tls": everything is encrypted as well
    certificate_file: str = ""  # for "tls": PEM, the job's certificate and its private key
    probe: bool = True  # whether to measure the network's bandwidth before training
    elastic: int = 0  # an elastic job goes on with this many workers at least; 0: the job is not elastic
    max_workers: int = 0  # workers may join an elastic job up to this many ranks; 0: only those of the start
    wait_for_hosts: float = 0.0  # s, an elastic job with too few workers waits so long for more; 0: it ends
    leave_seconds: float = 20.0  # after a notice to leave, this worker ends as a lost one if it has not left
    restart_servers: int = 0  # how many replacements of lost servers an elastic job can get
    joins: bool = False  # this process joins an elastic job that runs, perhaps in the place of one that was lost
    scheduler_file: str = ""  # says where the scheduler's newest incarnation is; "": if it is lost, the job ends
    incarnation: int = 1  # of the scheduler: which one this is; of others: which one the address above is of
    lost_before: frozenset[tuple[str, int]] = frozenset()  # for a later incarnation: processes that do not come back
    agent_fd: int | None = None  # scheduler: an inherited socket, its connection with the agent that has started it
    reports_steps: bool = False  # workers report how long they compute in a step, and the scheduler compares them
    launched: bool = False  # False: there is no launcher, and the process trains alone

    @property
    def ranks(self) -> int:
        """How many ranks workers can have: those of the start, and of workers that join later."""
        return max(self.num_workers, self.max_workers)

    def __repr__(self) -> str:  # without the key
        return f"Environment({self.role} {self.index}, job {self.job!r}, scheduler {self.root_host}:{self.root_port})"


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables. Raises UserError that names the missing or invalid variable."""
    values = os.environ if environ is None else environ
    if "DMLC_ROLE" not in values:
        return Environment(host_name=socket.gethostname())
    role = values["DMLC_ROLE"]
    if role not in ROLES:
        raise UserError(f"DMLC_ROLE={role!r}: expected one of {', '.join(ROLES)}")
    num_workers = _number(values, "DMLC_NUM_WORKER", minimum=1)
    num_servers = _number(values, "DMLC_NUM_SERVER", default=0)
    index_name = {"worker": "DMLC_WORKER_ID", "server": "DMLC_SERVER_ID"}.get(role)
    index = _number(values, index_name, default=_number(values, "DMLC_TASK_ID", default=0)) if index_name else 0
    joins, max_workers = _joins(values), _max_workers(values, num_workers)
    ranks = max(num_workers, max_workers) if joins else num_workers
    count = {"worker": ranks, "server": num_servers}.get(role, 1)
    if index >= count:
        raise UserError(f"{index_name}={index}: this job has {count} {role}s, expected 0 to {count - 1}")
    listen = values.get("DMLTRAIN_LISTEN_FD")
    heartbeat = _seconds(values, ("DMLTRAIN_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_INTERVAL"), 1.0)
    lost = _seconds(values, ("DMLTRAIN_HEARTBEAT_TIMEOUT", "PS_HEARTBEAT_TIMEOUT"), 8.5)
    if lost < 3 * max(1.0, heartbeat):
        raise UserError(
            f"a heartbeat timeout of {lost:g} s (DMLTRAIN_HEARTBEAT_TIMEOUT) is too short for an interval "
            f"of {heartbeat:g} s (DMLTRAIN_HEARTBEAT_INTERVAL): expected at least 3 intervals and at least 3 s"
        )
    return Environment(
        role=role,
        index=index,
        num_workers=num_workers,
        num_servers=num_servers,
        root_host=values.get("DMLC_PS_ROOT_URI", "127.0.0.1"),
        root_port=_number(values, "DMLC_PS_ROOT_PORT", default=0),
        node_host=values.get("DMLC_NODE_HOST", "127.0.0.1"),
        host_name=values.get("DMLTRAIN_HOST_NAME") or socket.gethostname(),
        job=values.get("DMLTRAIN_JOB", ""),
        key=_key(values.get("DMLTRAIN_KEY_FILE")),
        listen_fd=_number(values, "DMLTRAIN_LISTEN_FD") if listen else None,
        heartbeat_seconds=heartbeat,
        lost_seconds=lost,
        start_seconds=_seconds(values, ("DMLTRAIN_START_TIMEOUT",), 120.0),
        wait_seconds=_seconds(values, ("DMLTRAIN_WAIT_TIMEOUT",), 600.0),
        transport=_choice(values, "DMLTRAIN_TRANSPORT", TRANSPORTS),
        server_shares=_choice(values, "DMLTRAIN_SERVER_SHARES", SERVER_SHARES),
        host_sum=_choice(values, "DMLTRAIN_HOST_SUM", HOST_SUMS),
        wire=_choice(values, "DMLTRAIN_WIRE", WIRES),
        certificate_file=_certificate(values),
        update_on_kvstore=_switch(values, "MXNET_UPDATE_ON_KVSTORE"),
        probe=_switch(values, "DMLTRAIN_PROBE") is not False,
        elastic=_elastic(values, num_workers),
        max_workers=max_workers,
        wait_for_hosts=_seconds(values, ("DMLTRAIN_WAIT_FOR_HOSTS",), 0.0),
        leave_seconds=_seconds(values, ("DMLTRAIN_LEAVE_SECONDS",), 20.0),
        restart_servers=_number(values, "DMLTRAIN_RESTART_SERVERS", default=0),
        joins=joins,
        scheduler_file=values.get("DMLTRAIN_SCHEDULER_FILE", ""),
        incarnation=_number(values, "DMLTRAIN_INCARNATION", default=1, minimum=1),
        lost_before=_processes(values, "DMLTRAIN_LOST"),
        agent_fd=_number(values, "DMLTRAIN_AGENT_FD") if values.get("DMLTRAIN_AGENT_FD") else None,
        reports_steps=_switch(values, "DMLTRAIN_STRAGGLERS") is True,
        launched=True,
    )


def of_collectives(environment: Environment, environ: Mapping[str, str] | None = None) -> Environment:
    """`environment` of a program of torch.distributed, whose groups limit waits: DMLTRAIN_WAIT_TIMEOUT does so only if
    it is set."""
    values = os.environ if environ is None else environ
    return replace(environment, wait_seconds=_seconds(values, ("DMLTRAIN_WAIT_TIMEOUT",), UNLIMITED))


def with_choices(environment: Environment, **choices: str | None) -> Environment:
    """`environment` with these values of CHOICES; None leaves its own. Raises UserError for any other value."""
    given: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    for name, value in given.items():
        _one_of(name, value, CHOICES[name])
    return replace(environment, **given)


def measure_seconds(environ: Mapping[str, str] | None = None) -> float:
    """For how many seconds to measure steps instead of training; 0: train (docs/environment.md)."""
    return _seconds(os.environ if environ is None else environ, ("DMLTRAIN_MEASURE",), 0.0)


def check_file(environ: Mapping[str, str] | None = None) -> str:
    """The file of command lines to check instead of training; "": train (docs/environment.md)."""
    return (os.environ if environ is None else environ).get("DMLTRAIN_CHECK", "")


def audit(environ: Mapping[str, str] | None = None) -> str:
    """The folder in which a script writes its audit; "": an elastic job's has none (docs/elastic-scripts.md)."""
    return (os.environ if environ is None else environ).get("DMLTRAIN_AUDIT", "")


def replay(environ: Mapping[str, str] | None = None) -> str:
    """The views.json through which a script's elastic job goes again; "": none (docs/elastic-scripts.md)."""
    return (os.environ if environ is None else environ).get("DMLTRAIN_REPLAY", "")


def master(environ: Mapping[str, str] | None = None) -> str:
    """Where the first worker of a job of torch.distributed is; "" if it is not said."""
    return (os.environ if environ is None else environ).get("MASTER_ADDR", "")


def wire(environ: Mapping[str, str] | None = None) -> str:
    """How connections are to be protected, also where no launcher of ours has started this process."""
    return _choice(os.environ if environ is None else environ, "DMLTRAIN_WIRE", WIRES)


def key(environ: Mapping[str, str] | None = None) -> bytes:
    """The job's secret, also where no launcher of ours has started this process; empty without DMLTRAIN_KEY_FILE."""
    return _key((os.environ if environ is None else environ).get("DMLTRAIN_KEY_FILE"))


def inherited(**more: str) -> dict[str, str]:
    """This process's environment with `more`, for a process that it starts."""
    return {**os.environ, **more}


def cores(environ: Mapping[str, str] | None = None) -> int:
    """The cores that this process may use: what the launcher gave it in OMP_NUM_THREADS, else all of its affinity."""
    text = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(text) if text.isdecimal() and int(text) else len(os.sched_getaffinity(0))


def torch_place(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """This worker's rank among how many, as torchrun says it; (0, 1) if nothing does."""
    values = os.environ if environ is None else environ
    rank, size = _number(values, "RANK", default=0), _number(values, "WORLD_SIZE", default=1, minimum=1)
    if rank >= size:
        raise UserError(f"RANK={rank}: WORLD_SIZE={size}, so expected 0 to {size - 1}; the launcher sets both")
    return rank, size


def take_place_of_mpi() -> None:
    """Set torchrun's variables of this worker's place where only mpirun's say it, as Accelerate does on CPUs."""
    for name, others in OF_MPI.items():
        if value := next(filter(None, map(os.environ.get, others)), ""):
            set_default(name, value)


def local_workers(environ: Mapping[str, str] | None = None) -> int:
    """How many workers this host has, as torchrun says it; 1 if nothing does."""
    return _number(os.environ if environ is None else environ, "LOCAL_WORLD_SIZE", default=1, minimum=1)


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """The number of this worker among those of its host; 0 without a launcher."""
    return _number(os.environ if environ is None else environ, "LOCAL_RANK", default=0)


def set_default(name: str, value: str) -> None:
    """Set a variable that a library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def _number(values: Mapping[str, str], name: str, default: int | None = None, minimum: int = 0) -> int:
    text = values.get(name, "")
    if not text and default is not None:
        return default
    if not text.strip().isdecimal() or int(text) < minimum:
        raise UserError(
            f"{name}={text!r}: expected an integer of at least {minimum}; dmltrain-launch sets this variable"
        )
    return int(text)


def _choice(values: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    return _one_of(name, values.get(name) or choices[0], choices)


def _one_of(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UserError(f"{name}={text!r}: expected one of {', '.join(choices)}")
    return text


def _switch(values: Mapping[str, str], name: str) -> bool | None:
    text = values.get(name, "").lower()
    return text in ("1", "true") if text else None


def _processes(values: Mapping[str, str], name: str) -> frozenset[tuple[str, int]]:
    """Roles and numbers, such as worker:3,server:0."""
    parts = [word.partition(":") for word in values.get(name, "").split(",") if word]
    if not all(role in ("server", "worker") and number.isdecimal() for role, _, number in parts):
        raise UserError(f"{name}={values[name]!r}: expected processes such as worker:3,server:0")
    return frozenset((role, int(number)) for role, _, number in parts)


def _seconds(values: Mapping[str, str], names: tuple[str, ...], default: float) -> float:
    for name in names:
        text = values.get(name, "")
        if not text or text == "0":
            continue  # 0 is ps-lite's "off"; our heartbeats are always on
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0.0 < seconds < 1e9:
            raise UserError(f"{name}={text!r}: expected a positive number of seconds")
        return seconds
    return default


def _elastic(values: Mapping[str, str], num_workers: int) -> int:
    least = _number(values, "DMLTRAIN_ELASTIC", default=0)
    if least > num_workers:
        raise UserError(f"DMLTRAIN_ELASTIC={least}: this job has {num_workers} workers, expected 0 to {num_workers}")
    return least


def _max_workers(values: Mapping[str, str], num_workers: int) -> int:
    most = _number(values, "DMLTRAIN_MAX_WORKERS", default=0)
    if most and (most < num_workers or not _number(values, "DMLTRAIN_ELASTIC", default=0)):
        raise UserError(
            f"DMLTRAIN_MAX_WORKERS={most}: expected {num_workers} or more, the workers at the start, and only in an "
            "elastic job (DMLTRAIN_ELASTIC); unset it"
        )
    return most


def _joins(values: Mapping[str, str]) -> bool:
    joins = _switch(values, "DMLTRAIN_JOIN") is True
    if joins and (values["DMLC_ROLE"] == "scheduler" or not _number(values, "DMLTRAIN_ELASTIC", default=0)):
        raise UserError(
            f"DMLTRAIN_JOIN={values['DMLTRAIN_JOIN']}: only workers and servers can join, and only elastic jobs "
            "(DMLTRAIN_ELASTIC); unset it"
        )
    return joins


def _certificate(values: Mapping[str, str]) -> str:
    path = values.get("DMLTRAIN_CERTIFICATE_FILE", "")
    if values.get("DMLTRAIN_WIRE") != "tls" or os.access(path, os.R_OK):
        return path
    raise UserError(
        f"DMLTRAIN_WIRE=tls: DMLTRAIN_CERTIFICATE_FILE={path!r} cannot be read; "
        "dmltrain-launch --wire tls makes this file for each job"
    )


def _key(path: str | None) -> bytes:
    if not path:
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"DMLTRAIN_KEY_FILE={path}: {error.strerror}; the launcher writes this file") from error
    if not key:
        raise UserError(f"DMLTRAIN_KEY_FILE={path} is empty: expected the job's key; unset it to run without one")
    return key
