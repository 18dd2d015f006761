"""Sharding: keys -> slices of 256 KiB to 4 MiB -> servers. Pure; all workers compute the same plan.

Slices are placed by size, not by hash: the largest first, each on the server with the fewest bytes so far (lowest
number on a tie). So no server exceeds its share by more than one slice.

Hosts with slower links can get smaller shares of the weights: `shares`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_BYTES = 4 << 20  # of a slice
MIN_BYTES = 1 << 18  # of a slice of a key that is split; slices are multiples of it, and it of a codec's groups
PART_BYTES = 1 << 20  # of a slice of a key that is on one server
FRAME_BYTES = 1 << 20  # smaller slices cost more CPU time per byte
APART_BYTES = 1 << 19  # the same for servers on hosts without workers: nothing overlaps the answers of the last slices
SLICES_PER_SERVER = 24  # about, so that loads are even and transfers overlap; fewer of a small model, see `slice_size`
FEWEST_SLICES = 6  # about, per server, of a small model
SIMILAR = 1.5  # rates of hosts' links that differ by less are taken for equal: measurements differ by chance
BISECTIONS = 60  # each halves the interval, and a float has 53 bits


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + length) of a flat key, held by one server."""

    key: int
    index: int
    start: int
    length: int
    server: int


def cut(
    sizes: Sequence[int],
    itemsizes: Sequence[int],
    loads: list[int],
    first_key: int = 0,
    slice_bytes: int | None = None,
    shares: Sequence[float] | None = None,
    apart: bool = False,
    servers: Sequence[int] | None = None,
) -> list[list[Slice]]:
    """Place keys of `sizes` elements of `itemsizes` bytes. Returns each key's slices in order, each of `slice_bytes`
    (default: see `slice_size`) except the last.

    `loads` has the bytes on each server so far. It is updated in place, so that keys declared later go to the servers
    with fewer bytes. `shares`: of each server, in any unit (default: equal); one with the share 0 gets nothing.
    `apart`: no server is on a host with workers. `servers`: those that are left (default: all); where they are changes
    no slice's size.
    """
    if slice_bytes is None:
        fewest = FEWEST_SLICES if shares is None else SLICES_PER_SERVER  # unequal shares are met with small slices only
        total, frame_bytes = sum(map(operator.mul, sizes, itemsizes)), APART_BYTES if apart else FRAME_BYTES
        slice_bytes = slice_size(total, len(loads), fewest, frame_bytes)
    ranges = [
        (key, start, min(size - start, _elements(itemsize, slice_bytes)), itemsize)
        for key, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True))
        for start in range(0, max(size, 1), _elements(itemsize, slice_bytes))
    ]
    placed = place([length * itemsize for _, _, length, itemsize in ranges], loads, shares, servers)
    plan: list[list[Slice]] = [[] for _ in sizes]
    for (key, start, length, _), server in zip(ranges, placed, strict=True):
        plan[key].append(Slice(first_key + key, len(plan[key]), start, length, server))
    return plan


def place(
    sizes: Sequence[int], loads: list[int], shares: Sequence[float] | None = None, servers: Sequence[int] | None = None
) -> list[int]:
    """The server of each slice. `sizes`: bytes of the slices; for the rest see `cut`."""
    placed = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        placed[number] = server = _least_loaded(loads, sizes[number], shares, servers)
        loads[server] += sizes[number]
    return placed


def _least_loaded(
    loads: Sequence[int], size: int, shares: Sequence[float] | None, servers: Sequence[int] | None
) -> int:
    """The server with the smallest load for its share once it has `size` bytes more."""
    if servers is not None:
        return min(servers, key=lambda number: (loads[number], number))
    if shares is None:
        return loads.index(min(loads))
    holding = [number for number, share in enumerate(shares) if share > 0.0]
    return min(holding, key=lambda number: (loads[number] + size) / shares[number])


def cut_on(server: int, key: int, size: int, itemsize: int, slice_bytes: int = PART_BYTES) -> list[Slice]:
    """The slices of a key of `size` elements of `itemsize` bytes, all on one server."""
    length = _elements(itemsize, slice_bytes)
    return [
        Slice(key, index, start, min(size - start, length), server)
        for index, start in enumerate(range(0, max(size, 1), length))
    ]


def slice_size(total: int, servers: int, fewest: int = FEWEST_SLICES, frame_bytes: int = FRAME_BYTES) -> int:
    """Bytes of a slice, for keys with `total` bytes in all. A server gets about SLICES_PER_SERVER slices. Where these
    would be smaller than `frame_bytes`, it gets fewer, but about `fewest`."""
    wanted = max(total / (SLICES_PER_SERVER * servers), min(frame_bytes, total / (fewest * servers)))
    return min(MAX_BYTES, max(MIN_BYTES, math.ceil(wanted / MIN_BYTES) * MIN_BYTES))


def _elements(itemsize: int, slice_bytes: int) -> int:
    return max(1, slice_bytes // itemsize)


def shares(workers: Sequence[str], servers: Sequence[str], rates: Mapping[str, float]) -> list[float]:
    """The share of each server, at most 1 in all. `workers` and `servers`: the host of each; `rates`: bytes/s of hosts,
    in any unit; a host without a rate counts as the fastest. Equal shares where nothing else is better.

    In a step of dist_sync a host with workers sends its gradients, except those that its own servers sum. Its servers
    send their values to all other hosts with workers. With V bytes of weights of which the host's servers hold the
    share s, and m hosts with workers, that is V (1 - s) + s V (m - 1) for a host with workers, and s V m for a host of
    servers only. It receives as much. The slowest host decides when a step ends. So the shares are those for which all
    hosts take the same time, or hold nothing: a host whose link is much slower than the others' only sends and receives
    its own gradients.
    """
    count, hosts = Counter(servers), list(dict.fromkeys(servers))
    equal = [1.0 / len(servers)] * len(servers)
    known = [rate for rate in rates.values() if rate > 0]
    training = set(workers)
    if not known or max(known) < SIMILAR * min(known):
        return equal
    own = {host: rates.get(host) or max(known) for host in hosts}
    base = {host: float(host in training) for host in hosts}
    cost = {host: len(training) - 2 * base[host] for host in hosts}  # bytes for each byte that it holds
    if min(cost.values()) <= 0:  # two hosts with workers send as much, whatever they hold
        return equal

    def held(seconds: float) -> dict[str, float]:
        return {host: max(0.0, (seconds * own[host] - base[host]) / cost[host]) for host in hosts}

    low, high = 0.0, (len(training) + 1.0) / min(own.values())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(held(middle).values()) < 1.0 else (low, middle)
    held_by = held(high)
    return [held_by[host] / sum(held_by.values()) / count[host] for host in servers]
