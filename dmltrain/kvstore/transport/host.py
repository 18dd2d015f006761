"""The hosts of a job's processes, from what each process reports when it registers. Pure but for `identity`.

Two processes can share memory through a unix socket (rendezvous.py) exactly if they have the same kernel and the same
network namespace. This defines a host here, so a container with its own network is a host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dmltrain.kvstore.transport.message.job import Start

Ranks = tuple[int, ...]


def identity() -> str:
    """An identifier that is equal for all processes of a host and differs between hosts; "" if not available."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{kernel} {os.stat('/proc/self/ns/net').st_ino}"
    except (OSError, ValueError):
        return ""


def of_workers(identities: Sequence[str]) -> tuple[Ranks, ...]:
    """The ranks on each host, in the order of their lowest ranks. A worker without an identity is a host of its own."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(identities):
        hosts.setdefault(name or f"of worker {rank}", []).append(rank)
    return tuple(map(tuple, hosts.values()))


def at_start(start: Start) -> tuple[Ranks, ...]:
    """The ranks on each host, from the scheduler's start message."""
    return of_workers([worker.host_id for worker in start.workers])


def relayed(start: Start, rank: int) -> tuple[Ranks, list[int]]:
    """The ranks on this worker's host, and the servers on other hosts for which the host's relay sums the pushes of
    these ranks. Both are empty if there is nothing to sum, if a worker of the host has no unix socket, and for a worker
    that has come after the start."""
    if rank >= len(start.workers):
        return (), []
    name = start.workers[rank].host_id
    ranks = next(ranks for ranks in at_start(start) if rank in ranks)
    far = [number for number, server in enumerate(start.servers) if server.host_id != name]
    reachable = all(start.workers[rank].socket_name for rank in ranks)
    return (ranks, far) if len(ranks) > 1 and far and reachable else ((), [])


def apart(start: Start) -> bool:
    """Whether no server is on a host with workers."""
    workers = {worker.host_id for worker in start.workers}
    servers = {server.host_id for server in start.servers}
    return "" not in workers | servers and workers.isdisjoint(servers)


def relays(start: Start, server: int) -> list[int]:
    """The workers whose relay connects to this server."""
    leaders = []
    for leader, *_ in at_start(start):
        ranks, far = relayed(start, leader)
        if ranks and server in far:
            leaders.append(leader)
    return leaders
