"""Who shares a host, by what every process tells the scheduler about itself. Pure but for `identity`.

Two processes can share memory through a unix socket (rendezvous.py) exactly when they have the same kernel and the same
network namespace: that is a host here, and a container with a network of its own is one as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dmltrain.kvstore.transport.message import Start

Ranks = tuple[int, ...]


def identity() -> str:
    """The same for all processes of one host and no other's; "" where it cannot be told."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{kernel} {os.stat('/proc/self/ns/net').st_ino}"
    except (OSError, ValueError):
        return ""


def of_workers(identities: Sequence[str]) -> tuple[Ranks, ...]:
    """The ranks on each host, hosts in the order of their lowest rank. A worker that does not know its host has one of
    its own."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(identities):
        hosts.setdefault(name or f"of worker {rank}", []).append(rank)
    return tuple(map(tuple, hosts.values()))


def at_start(start: Start) -> tuple[Ranks, ...]:
    """The same from what the scheduler tells at the start."""
    return of_workers([worker.host_id for worker in start.workers])


def relayed(start: Start, rank: int) -> tuple[Ranks, list[int]]:
    """The workers of this worker's host, whose pushes the first of them sums, and the servers for which it does so:
    those on other hosts. Empty where there is nothing to sum, or a worker of the host cannot be met."""
    name = start.workers[rank].host_id
    ranks = next(ranks for ranks in at_start(start) if rank in ranks)
    far = [number for number, server in enumerate(start.servers) if server.host_id != name]
    reachable = all(start.workers[each].socket_name for each in ranks)
    return (ranks, far) if len(ranks) > 1 and far and reachable else ((), [])
