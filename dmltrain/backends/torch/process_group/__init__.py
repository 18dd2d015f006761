"""The backend's name in torch.distributed, and the process groups that torch asks it for.

The first group, which has all workers of the job, sums large tensors on the servers. Other groups use gloo alone: a
server waits for the tensors of all workers of the job.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dmltrain.backends.torch.process_group.group import Group
from dmltrain.backends.torch.process_group.sums import SumsOnServers
from dmltrain.backends.torch.process_group.watch import Watch
from dmltrain.base import env
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.worker.store import DistKVStore

NAME = "dmltrain"
Connect = Callable[[Environment], KVStore]  # to the servers of the job


def register(connect: Connect) -> None:
    """Make the backend known to torch."""
    if NAME.upper() not in dist.Backend._plugins:
        make = functools.partial(_group, connect)
        dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
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


@dataclass(frozen=True)
class Job:
    """What all groups of this process share, also those that are made after destroy_process_group."""

    address: str  # of this host on the training network; "": gloo looks for one
    watch: Watch
    sums: SumsOnServers | None


def _group(connect: Connect, options: Any, _: object) -> Group:
    """`options`: torch's _DistributedBackendOptions."""
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    if not ranks:  # the default group
        job = joined(connect, rank, size)
        return Group(options.store, list(range(size)), rank, options.timeout, job.address, job.watch, job.sums)
    job = joined(connect, dist.get_rank(), dist.get_world_size())
    return Group(options.store, ranks, rank, options.timeout, job.address, job.watch, None)


@functools.cache
def joined(connect: Connect, rank: int, size: int) -> Job:
    """Connects to the servers at the first call. `rank` of `size`: as torch was told."""
    environment = env.read()
    store = _store(connect, environment, rank, size)
    sums = SumsOnServers(store) if store else None
    return Job(environment.node_host if environment.launched else "", Watch(store), sums)


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
    if environment.wire != "plain":
        raise UserError(
            f"--wire {environment.wire} protects the connections with the servers, not those of gloo, which "
            "torch.distributed uses for all but large sums: start the job without --wire, or use dmltrain.distribute"
        )
    if environment.num_servers == 0:
        return None
    store = connect(environment)
    assert isinstance(store, DistKVStore)
    return store
