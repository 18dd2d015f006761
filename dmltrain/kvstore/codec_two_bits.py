"""Two bits an element: 0, +threshold, -threshold, or NaN; MXNet's `2bit` gradient compression.

What is at least a threshold from 0 is sent as one threshold of its sign, the rest stays in the residual (MXNet 1.9.1,
src/kvstore/gradient_compression.cc; Strom, "Scalable distributed DNN training using commodity GPU cloud computing",
2015, section 3). On the wire: four elements a byte, the first in the lowest bits; 0: 0, 1: +, 2: -, 3: NaN. MXNet
encodes pushes only and sends the sums whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dmltrain.kvstore.codec_block import BlockCodec, scratch

_NAN = 3
_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)  # times four codes in four bytes: all in the highest byte


@dataclass(frozen=True)
class TwoBits(BlockCodec):
    """`threshold` is in the unit of the gradients, more than 0."""

    threshold: float = 0.5

    name = "2bit"
    number = 5
    needs_residual = True

    def nbytes(self, length: int) -> int:
        return -(-length // 4)

    def of_sum(self, num_workers: int) -> TwoBits:
        return replace(self, threshold=self.threshold * num_workers)

    def write(self, part: np.ndarray, start: int, target: np.ndarray, length: int) -> None:
        quarter = self.nbytes(part.size)
        codes, below = scratch("codes", 4 * quarter, np.uint8), scratch("below", part.size, np.bool_)
        codes[part.size:] = 0
        inside, threshold = codes[:part.size], np.float32(self.threshold)
        np.less_equal(part, -threshold, out=below)
        np.add(below.view(np.uint8), below.view(np.uint8), out=inside)
        np.greater_equal(part, threshold, out=below)
        np.bitwise_or(inside, below.view(np.uint8), out=inside)
        np.isfinite(part, out=below)
        if not below.all():
            inside[~below] = _NAN
        words = codes.view(np.uint32)
        np.multiply(words, _GATHER, out=words)
        np.right_shift(words, 24, out=words)
        np.copyto(target[start // 4:start // 4 + quarter], words, casting="unsafe")

    def read(self, data: np.ndarray, start: int, length: int, into: np.ndarray) -> None:
        quarter = self.nbytes(into.size)
        indices, values = scratch("indices", quarter, np.intp), scratch("fours", 4 * quarter)
        np.copyto(indices, data[start // 4:start // 4 + quarter])
        np.take(_fours(self.threshold), indices, out=values.view(np.complex128), mode="wrap")  # none can be outside
        np.copyto(into, values[:into.size])


@cache
def _fours(threshold: float) -> np.ndarray:
    """The four values (float32) of each byte, as one element of 16 bytes."""
    values = np.array([0.0, threshold, -threshold, np.nan], np.float32)
    codes = np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3
    return values[codes].view(np.complex128).reshape(256)
