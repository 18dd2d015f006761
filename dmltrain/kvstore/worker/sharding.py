"""Where every key lives: keys -> slices of 256 KiB to 4 MiB -> servers. Pure; every worker computes the same plan.

Slices are placed by bytes, never by hash: each goes to the server that holds the fewest bytes so far (lowest number on
a tie), big ones first, so that no server carries more than one slice above its share.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

MOST_BYTES = 4 << 20  # of a slice
LEAST_BYTES = 1 << 18  # where a key is split; slices are multiples of it, the size of compression's groups
SHARES = 24  # slices that a server has at least, if it can: as much of its load is even, and overlaps


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + length) of a flat key, held by one server."""

    key: int
    index: int
    start: int
    length: int
    server: int


def cut(
    sizes: Sequence[int], itemsizes: Sequence[int], loads: list[int], first_key: int = 0, slice_bytes: int | None = None
) -> list[list[Slice]]:
    """Place keys of `sizes` elements of `itemsizes` bytes; returns each key's slices in order, of `slice_bytes` each
    (default: see `slice_size`) but the last.

    `loads` has the bytes that each server holds already; it is brought up to date in place, so that keys declared later
    fill the emptier servers.
    """
    if slice_bytes is None:
        slice_bytes = slice_size(sum(map(operator.mul, sizes, itemsizes)), len(loads))
    ranges = [
        (key, start, min(size - start, _elements(itemsize, slice_bytes)), itemsize)
        for key, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True))
        for start in range(0, max(size, 1), _elements(itemsize, slice_bytes))
    ]
    placed: dict[tuple[int, int], int] = {}
    for key, start, length, itemsize in sorted(ranges, key=lambda p: (-p[2] * p[3], p[0], p[1])):
        server = loads.index(min(loads))
        loads[server] += length * itemsize
        placed[key, start] = server
    plan: list[list[Slice]] = [[] for _ in sizes]
    for key, start, length, _ in ranges:
        plan[key].append(Slice(first_key + key, len(plan[key]), start, length, placed[key, start]))
    return plan


def slice_size(total: int, servers: int) -> int:
    """Bytes of the slices of keys that are `total` bytes together."""
    wanted = -(-total // (SHARES * servers * LEAST_BYTES)) * LEAST_BYTES
    return min(MOST_BYTES, max(LEAST_BYTES, wanted))


def _elements(itemsize: int, slice_bytes: int) -> int:
    return max(1, slice_bytes // itemsize)
