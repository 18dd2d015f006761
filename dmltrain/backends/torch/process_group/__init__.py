"""The backend's name in torch.distributed, and the process groups that torch asks it for.

The first group, which has all workers of the job, sums large tensors on the servers, or has the memory that all workers
of one host share. Other groups use gloo alone: a server waits for the tensors of all workers of the job.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from dmltrain.backends.torch.process_group import beside, host_memory
from dmltrain.backends.torch.process_group.group import Group
from dmltrain.backends.torch.process_group.host_collectives import HostCollectives
from dmltrain.backends.torch.process_group.sums import SumsOnServers
from dmltrain.backends.torch.process_group.watch import Watch
from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.waiting import Waits
from dmltrain.kvstore.worker.store import DistKVStore

NAME = "dmltrain"
Connect = Callable[[Environment], KVStore]  # to the servers of the job


def register(connect: Connect) -> None:
    """Make the backend known to torch."""
    if NAME.upper() not in dist.Backend._plugins:
        make = functools.partial(_group, connect)
        dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
        atexit.register(_say_at_end)
        dist.monitored_barrier = c10d.monitored_barrier = _with_monitored_barrier(c10d.monitored_barrier)


def _with_monitored_barrier(plain: Callable[..., None]) -> Callable[..., None]:
    """torch's own function refuses every group that does not call itself gloo."""

    @functools.wraps(plain)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        own = group or dist.group.WORLD
        if not isinstance(own, Group):
            return plain(group, timeout, wait_all_ranks)
        return own.monitored_barrier(
            datetime.timedelta(seconds=timeout) if isinstance(timeout, float) else timeout, wait_all_ranks
        )

    return monitored_barrier


def begin() -> bool:
    """Make torch's default group of the workers that a launcher or torchrun has started, if it is not there yet;
    returns whether one has. Raises UserError if there is a group of another backend."""
    launched = env.read().launched
    if not launched and env.master():
        env.take_place_of_mpi()  # of `accelerate launch --mpirun_hostfile`
    if not launched and env.torch_place()[1] == 1:
        return False
    if not dist.is_initialized():
        dist.init_process_group(NAME)
    elif dist.get_backend() != NAME:
        raise UserError(
            f"torch.distributed has a group of {dist.get_backend()} already, which stays: make that of dmltrain first, "
            "before Accelerator(), TrainingArguments() and init_process_group()"
        )
    return True


@dataclass(frozen=True)
class Job:
    """What all groups of this process share, also those that are made after destroy_process_group."""

    address: str  # of this host on the training network; "": gloo looks for one
    watch: Watch
    sums: SumsOnServers | None


_jobs: dict[tuple[int, int], Job] = {}  # by rank and size


def leave() -> None:
    """Leave the job, in a process that is killed afterwards. Raises JobLost."""
    atexit.unregister(_say_at_end)
    _say_at_end()
    for job in _jobs.values():
        if job.sums:
            job.sums.store.close()


def bytes_summed() -> int:
    """Of this worker's tensors that the servers have summed, or the workers of one host in shared memory."""
    return sum(job.sums.bytes for job in _jobs.values() if job.sums)


def waited() -> dict[str, float]:
    """Seconds for which this worker has waited for sums from the servers so far, by cause: own-host, wire, server,
    straggler (docs/performance.md). A thread of its own waits, so the script may have computed meanwhile. Sums in the
    shared memory of one host are not counted."""
    waits = sum((job.sums.store.waits for job in _jobs.values() if job.sums), Waits())
    return {name.replace("_", "-"): seconds for name, seconds in vars(waits).items()}


def _say_at_end() -> None:
    """Worker 0 says where the time of its sums went, or that the job had servers in vain, or none. A script that ends
    with an error says why itself, and one without our group may use a kvstore."""
    if hasattr(sys, "last_value") or (DistKVStore.present and not _jobs) or not _is_first():
        return
    if not bytes_summed():
        sys.stderr.write(f"dmltrain: worker 0: no byte went over the servers: {_why_unused()}\n")
    elif sum((times := waited()).values()):
        shown = " ".join(f"{name}={seconds:.3f}" for name, seconds in times.items())
        sys.stderr.write(f"dmltrain: worker 0: {bytes_summed() / 1e6:.0f} MB summed; s of waits for sums: {shown}\n")


def _why_unused() -> str:
    """Why no byte went over the servers, and what to change."""
    instead = "-s 0" if env.read().launched else 'init_process_group("gloo")'
    least = max((job.sums.least for job in _jobs.values() if job.sums), default=0)
    floats = f"float32 or float64 of {least >> 10} KiB or more" if least > 1 else "floats"
    if _jobs:
        return f"no all_reduce was a sum of {floats}, so gloo made all sums: {instead} trains the same"
    return (
        "the script made no process group of dmltrain: call dmltrain.torch.accelerate.prepare() before "
        'Accelerator() or TrainingArguments(), or init_process_group("dmltrain")'
    )


def _is_first() -> bool:
    """Whether this is worker 0 of a job that has servers, or could have them beside its workers."""
    environment = env.read()
    if environment.launched:
        return environment.num_servers > 0 and environment.index == 0
    rank, size = next(iter(_jobs), None) or env.torch_place()
    return rank == 0 and size > 1


def _group(connect: Connect, options: Any, _: object) -> Group:
    """`options`: torch's _DistributedBackendOptions."""
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    if not ranks:  # the default group
        job = joined(connect, rank, size, options.store)
        return Group(options.store, list(range(size)), rank, options.timeout, job.address, job.watch, job.sums)
    job = joined(connect, dist.get_rank(), dist.get_world_size())
    return Group(options.store, ranks, rank, options.timeout, job.address, job.watch, None)


def joined(connect: Connect, rank: int, size: int, meeting: Store | None = None) -> Job:
    """Connects to the servers at the first call. `rank` of `size`: as torch was told. `meeting`: of all workers, to
    start servers where no launcher has; None: without servers then."""
    if (rank, size) not in _jobs:
        environment = env.read()
        if size > 1 or environment.launched:
            _refuse_protection(env.wire())
        if meeting and size > 1 and not environment.launched:
            environment = beside.start(meeting, rank, size)
        address = environment.node_host if environment.launched else ""
        store = _store(connect, environment := env.of_collectives(environment), rank, size)
        _jobs[rank, size] = Job(address, Watch(store), _sums(store, environment, meeting) if store else None)
    return _jobs[rank, size]


def _refuse_protection(wire: str) -> None:
    if wire != "plain":
        raise UserError(
            f"--wire {wire} (DMLTRAIN_WIRE) protects the connections with the servers, not those of gloo, which "
            "torch.distributed uses for all but large sums: start the job without it, or use dmltrain.distribute"
        )


def _sums(store: DistKVStore, environment: Environment, meeting: Store | None) -> SumsOnServers:
    memory = None
    if meeting and store.num_workers > 1 and len(host.at_start(store.start_message)) == 1:
        lost = functools.partial(store.lost_within, 0.0)
        wanted, limit = environment.transport != "tcp", environment.wait_seconds
        memory = host_memory.shared(meeting, store.rank, store.num_workers, wanted, lost, limit)
    return SumsOnServers(store, HostCollectives(memory) if memory else None)


def _store(connect: Connect, environment: Environment, rank: int, size: int) -> DistKVStore | None:
    """Of a job with servers. Raises UserError if torch was told another place in the job than the launcher's."""
    if not environment.launched:
        return None
    if (rank, size) != (environment.index, environment.num_workers):
        raise UserError(
            f"init_process_group was told rank {rank} of {size}, but dmltrain-launch has started this process as "
            f"worker {environment.index} of {environment.num_workers}: leave out rank= and world_size=, or pass the "
            "launcher's RANK and WORLD_SIZE"
        )
    if environment.num_servers == 0:
        return None
    store = connect(environment)
    assert isinstance(store, DistKVStore)
    return store
