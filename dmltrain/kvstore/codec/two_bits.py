"""Two bits an element: 0, +threshold, -threshold, or NaN: MXNet's `2bit`.

What is at least a threshold from 0 is sent as one threshold of its sign, the rest stays in the residual (MXNet 1.9.1,
src/kvstore/gradient_compression.cc; Strom, "Scalable distributed DNN training using commodity GPU cloud computing",
2015, section 3). A sum of n workers is up to n thresholds from 0 and must be sent in steps of n thresholds, else the
rest grows without end. Without a threshold: four_levels.py.

On the wire: the codes, four a byte, the first in the lowest bits; 0: 0, 1: +, 2: -, 3: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.codec.block import BlockCodec, not_finite, pack, quarter
from dmltrain.kvstore.scratch import scratch

_NAN = 3


@dataclass(frozen=True)
class TwoBits(BlockCodec):
    """`threshold` is in the unit of the gradients, a normal float32 above 0."""

    threshold: float

    name = "2bit"
    number = 5
    needs_residual = True

    def nbytes(self, length: int) -> int:
        return quarter(length)

    def of_sum(self, num_workers: int) -> TwoBits:
        return replace(self, threshold=self.threshold * num_workers)

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        packed = target[start // 4 : start // 4 + quarter(block.size)]
        bad, codes = not_finite(block), scratch("codes", 4 * packed.size, np.uint8)
        _choose(block, np.float32(self.threshold), codes)
        if bad is not None:
            codes[: block.size][bad] = _NAN
        pack(codes, packed)

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        packed = data[start // 4 : start // 4 + quarter(into.size)]
        values, indices = scratch("fours", 4 * packed.size), scratch("indices", packed.size, np.intp)
        np.copyto(indices, packed)
        pairs = _fours(self.threshold).view(np.complex128)  # four float32 as one element: take moves it at once
        np.take(pairs, indices, out=values.view(np.complex128), mode="wrap")  # faster than "raise"; none can be outside
        np.copyto(into, values[: into.size])


def _choose(block: Array, threshold: np.float32, codes: Array) -> None:
    """The code of each element, 0 behind the last."""
    below, inside = scratch("below", block.size, np.bool_), codes[: block.size]
    codes[block.size :] = 0
    np.less_equal(block, -threshold, out=below)
    np.add(below.view(np.uint8), below.view(np.uint8), out=inside)
    np.greater_equal(block, threshold, out=below)
    np.bitwise_or(inside, below.view(np.uint8), out=inside)


@cache
def _fours(threshold: float) -> Array:
    """The four values of each byte: float32, 1024 elements."""
    values = np.array([0.0, 1.0, -1.0, np.nan], np.float32) * np.float32(threshold)
    fours: Array = values[np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3].reshape(-1)
    return fours
