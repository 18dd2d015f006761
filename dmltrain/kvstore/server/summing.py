"""The arithmetic of a server: adding the workers' gradients. Pure; numpy only.

Sums go through memory once: block by block, each block over all workers while it is in the cache, always in the same
order: first the workers of each host, then host by host. An element's sum depends neither on the block size nor on who
carries it out, and a host may send its workers' sum in their place (relay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.scratch import BLOCK, scratch

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec


def total(hosts: Sequence[Sequence[Array]], out: Array) -> None:
    """out[:] = (a + b + ...) + (c + d + ...) + ..., flat arrays of one type and length: first within each host, then
    host by host, in this order; `out` may be one of the first two arrays."""
    parts = [part for host in hosts for part in host]
    if len(parts) == 1:
        if out is not parts[0]:
            np.copyto(out, parts[0])
        return
    block = BLOCK if len(parts) > 2 else max(1, len(out))
    for start in range(0, len(out), block):
        own = out[start : start + block]
        first = _within([part[start : start + block] for part in hosts[0]], own)
        for host in hosts[1:]:
            first = np.add(first, _within([part[start : start + block] for part in host]), out=own)


def _within(parts: Sequence[Array], out: Array | None = None) -> Array:
    """The sum of one host's blocks; `out` or this thread's own memory, or the one block there is."""
    if len(parts) == 1:
        return parts[0]
    if out is None:
        out = scratch(f"host {parts[0].dtype}", parts[0].size, parts[0].dtype.type)
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        np.add(out, part, out=out)
    return out


def total_of_coded(parts: Sequence[tuple[Codec, Array]], out: Array) -> None:
    """The same from encoded parts, uint8, each with the codec that it was encoded by."""
    codec, first = parts[0]
    codec.decode(first, out)
    for codec, part in parts[1:]:
        codec.add(part, out)
