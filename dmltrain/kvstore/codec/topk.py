"""The k elements with the largest magnitudes, and their positions; all others stay in the residual.

On the wire: k positions (uint32, ascending), then k values (float32), with k = ceil(ratio * length). Of equal
magnitudes the first are sent. Magnitudes are compared as bits: NaN is above inf, and inf above all numbers. The method:
Aji and Heafield, "Sparse communication for distributed gradient descent", 2017, section 3; its convergence: Stich et
al., "Sparsified SGD with memory", 2018.

The k largest are selected among the elements above an estimate from a sample. If the estimate was too high, they are
selected among all elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec.block import Codec, Parameter, blocks
from dmltrain.kvstore.scratch import scratch

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = 0x7F800000
_SAMPLE = 8192  # elements


@dataclass(frozen=True)
class TopK(Codec):
    """The ratio * n elements with the largest magnitudes, and their positions."""

    ratio: float = 0.01

    name = "topk"
    number = 6
    size = "8 * ratio * n"
    parameter = Parameter("ratio", 1e-9, 1.0)
    fixed_size = False
    needs_residual = True

    def count(self, length: int) -> int:
        """k: how many of `length` elements are sent."""
        return min(length, math.ceil(self.ratio * length))

    def nbytes(self, length: int) -> int:
        return 8 * self.count(length)

    def encode(self, source: Array, target: Array, residual: Array | None = None) -> None:
        self.check(target, source.size)
        count = self.count(source.size)
        if not count:
            return
        total = np.zeros_like(source) if residual is None else residual
        with np.errstate(all="ignore"):
            threshold = _estimate(source, total, count)
            positions, magnitudes = _at_least(threshold, source, total)
        if positions.size < count:
            magnitudes = total.view(np.uint32) & _MAGNITUDE
            positions = np.arange(source.size)
        chosen, overflow = _largest(positions, magnitudes, count)
        target[: 4 * count].view(np.uint32)[:] = chosen
        target[4 * count :].view(np.float32)[:] = total[chosen]
        total[chosen] = 0.0
        if overflow:
            total[~np.isfinite(total)] = 0.0

    def decode(self, data: Array, out: Array) -> None:
        positions, values = self._fields(data, out.size)
        out[:] = 0.0
        out[positions] = values

    def add(self, data: Array, total: Array) -> None:
        positions, values = self._fields(data, total.size)
        total[positions] += values

    def check_sent(self, data: Array, length: int) -> None:
        self.check(data, length)
        positions = data[: len(data) // 2].view(np.uint32)
        if len(positions) and int(positions.max()) >= length:
            raise ValueError(f"topk: position {positions.max()} is outside of the {length} elements")

    def _fields(self, data: Array, length: int) -> tuple[Array, Array]:
        self.check_sent(data, length)
        half = len(data) // 2
        return data[:half].view(np.uint32), data[half:].view(np.float32)


def _estimate(source: Array, residual: Array, count: int) -> int:
    """A magnitude, as bits, that slightly more than `count` elements of source + residual reach."""
    step = max(1, source.size // _SAMPLE) | 1  # odd, so that it is no multiple of the period of most shapes
    sample = (source[::step] + residual[::step]).view(np.uint32) & _MAGNITUDE
    expected = count * sample.size / source.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 1)
    if rank >= sample.size:
        return 0
    return int(np.partition(sample, sample.size - rank)[sample.size - rank])


def _at_least(threshold: int, source: Array, total: Array) -> tuple[Array, Array]:
    """total += source; positions, ascending, and magnitudes of the elements that reach the threshold."""
    positions, magnitudes = [], []
    for start, stop in blocks(source.size):
        block = total[start:stop]
        np.add(block, source[start:stop], out=block)
        bits, above = scratch("bits", block.size, np.uint32), scratch("finite", block.size, np.bool_)
        np.bitwise_and(block.view(np.uint32), _MAGNITUDE, out=bits)
        np.greater_equal(bits, np.uint32(threshold), out=above)
        indices = np.flatnonzero(above)
        positions.append(indices + start)
        magnitudes.append(bits[indices])
    return np.concatenate(positions), np.concatenate(magnitudes)


def _largest(positions: Array, magnitudes: Array, count: int) -> tuple[Array, bool]:
    """The positions, ascending, of the `count` largest; whether NaN or inf may remain among the others."""
    edge = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    chosen = magnitudes > edge
    equal = np.flatnonzero(magnitudes == edge)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return positions[chosen], bool(edge >= _INFINITE)
