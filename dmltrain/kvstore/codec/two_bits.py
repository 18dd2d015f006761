"""Two bits an element: 0, +threshold, -threshold, or NaN: MXNet's `2bit`. (Without a threshold: four_levels.py.)

Magnitudes of at least the threshold are sent as the threshold with their sign; the rest stays in the residual (MXNet
1.9.1, src/kvstore/gradient_compression.cc; Strom, "Scalable distributed DNN training using commodity GPU cloud
computing", 2015, section 3). A sum over n workers reaches n thresholds. It is sent in steps of n thresholds, because
with smaller steps its residual could grow without limit.

On the wire: the codes, four to a byte, the first in the lowest bits; 0: 0, 1: +, 2: -, 3: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec.block import BlockCodec, nonfinite_mask, pack, packed_size
from dmltrain.kvstore.scratch import scratch

_NAN = 3


@dataclass(frozen=True)
class TwoBits(BlockCodec):
    """`threshold` is in the unit of the gradients: a normal, positive float32."""

    threshold: float

    name = "2bit"
    number = 5
    needs_residual = True

    def nbytes(self, length: int) -> int:
        return packed_size(length)

    def of_sum(self, num_workers: int) -> TwoBits:
        return replace(self, threshold=self.threshold * num_workers)

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        packed = target[start // 4 : start // 4 + packed_size(block.size)]
        nonfinite, codes = nonfinite_mask(block), scratch("codes", 4 * packed.size, np.uint8)
        _choose(block, np.float32(self.threshold), codes)
        if nonfinite is not None:
            codes[: block.size][nonfinite] = _NAN
        pack(codes, packed)

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        packed = data[start // 4 : start // 4 + packed_size(into.size)]
        values, indices = scratch("fours", 4 * packed.size), scratch("indices", packed.size, np.intp)
        np.copyto(indices, packed)
        pairs = fours(self.threshold).view(np.complex128)  # four float32 as one element, which np.take copies at once
        np.take(pairs, indices, out=values.view(np.complex128), mode="wrap")  # faster than "raise"; none can be outside
        np.copyto(into, values[: into.size])


def _choose(block: Array, threshold: np.float32, codes: Array) -> None:
    """Write the code of each element, then zeros."""
    below, inside = scratch("below", block.size, np.bool_), codes[: block.size]
    codes[block.size :] = 0
    np.less_equal(block, -threshold, out=below)
    np.add(below.view(np.uint8), below.view(np.uint8), out=inside)
    np.greater_equal(block, threshold, out=below)
    np.bitwise_or(inside, below.view(np.uint8), out=inside)


@cache
def fours(threshold: float) -> Array:
    """The four values of each of the 256 bytes: float32, (1024,)."""
    values = np.array([0.0, 1.0, -1.0, np.nan], np.float32) * np.float32(threshold)
    fours: Array = values[np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3].reshape(-1)
    return fours
