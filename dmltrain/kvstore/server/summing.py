"""The sum of the workers' gradients. Pure; numpy only.

A sum reads memory once: it adds all workers' values of a block while the block is in the cache. The order is always the
same: first the workers of each host, then the hosts' sums. So an element's sum depends neither on the block size nor on
the process that computes it, and a host may send its workers' sum in place of their gradients (relay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.scratch import BLOCK, scratch

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec


def total(hosts: Sequence[Sequence[Array]], out: Array, factor: float = 1.0) -> None:
    """out[:] = ((a + b + ...) + (c + d + ...) + ...) * factor, flat arrays of one type and length: first within each
    host, then host by host, in this order; `out` may be one of the first two arrays."""
    count = sum(map(len, hosts))
    if count == 1:
        return _only(hosts[0][0], out, factor)
    if len(out) <= BLOCK or (count == 2 and factor == 1.0):
        return _block(hosts, out, factor)
    for start in range(0, len(out), BLOCK):
        part = slice(start, start + BLOCK)
        _block([[array[part] for array in host] for host in hosts], out[part], factor)


def _block(hosts: Sequence[Sequence[Array]], out: Array, factor: float) -> None:
    first = _within(hosts[0], out)
    for host in hosts[1:]:
        first = np.add(first, _within(host), out=out)
    if factor != 1.0:
        np.multiply(out, factor, out=out)


def _only(array: Array, out: Array, factor: float) -> None:
    if factor != 1.0:
        np.multiply(array, factor, out=out)
    elif out is not array:
        np.copyto(out, array)


def _within(arrays: Sequence[Array], out: Array | None = None) -> Array:
    """The sum of one host's blocks, in `out` or this thread's scratch memory. A single block is returned itself."""
    if len(arrays) == 1:
        return arrays[0]
    if out is None:
        out = scratch(f"host {arrays[0].dtype}", arrays[0].size, arrays[0].dtype.type)
    np.add(arrays[0], arrays[1], out=out)
    for array in arrays[2:]:
        np.add(out, array, out=out)
    return out


def total_of_coded(arrays: Sequence[tuple[Codec, Array]], out: Array) -> None:
    """out[:] = the sum of encoded arrays (uint8), each with its codec."""
    codec, first = arrays[0]
    codec.decode(first, out)
    for codec, array in arrays[1:]:
        codec.add(array, out)
