"""Two bits an element: 0, +level, -level, or NaN, with one level for each 65,536 elements.

With a threshold, MXNet's `2bit`: what is at least a threshold from 0 is sent as one threshold of its sign, the rest
stays in the residual (MXNet 1.9.1, src/kvstore/gradient_compression.cc; Strom, "Scalable distributed DNN training using
commodity GPU cloud computing", 2015, section 3). A sum of n workers is up to n thresholds from 0 and must be sent in
steps of n thresholds, else the rest grows without end.

Without one the levels follow the gradients: what is at least 1.7 times the mean magnitude from 0 (a sixth of normal
values) is sent as the mean of what is sent (after Li et al., "Ternary weight networks", 2016, section 2.2; of 0.7 to 4
times, 1.4 to 2 converged best). Gradients become a hundred times smaller during training; no fixed threshold suits its
beginning and its end: too small, and the rest grows; too great, and late steps are too coarse.

On the wire: ceil(length / 65536) levels (float32), then the codes, four a byte, the first in the lowest bits; 0: 0,
1: +, 2: -, 3: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dmltrain.kvstore.codec_block import BLOCK, BlockCodec, constant, not_finite, scratch

GROUP = BLOCK  # elements that share a level; part of the format
_NAN = 3
_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)  # times four codes in four bytes: all in the highest byte
_MEANS = 1.7
_LEAST = float(np.finfo(np.float32).tiny)  # of a threshold


@dataclass(frozen=True)
class TwoBits(BlockCodec):
    """`threshold` is in the unit of the gradients, a normal float32 above 0; None: the levels follow the gradients."""

    threshold: float | None = None

    name = "2bit"
    number = 5
    needs_residual = True

    def nbytes(self, length: int) -> int:
        return 4 * _groups(length) + _quarter(length)

    def of_sum(self, num_workers: int) -> TwoBits:
        return self if self.threshold is None else replace(self, threshold=self.threshold * num_workers)

    def write(self, part: np.ndarray, start: int, target: np.ndarray, length: int) -> None:
        levels, packed = _parts(target, start, part.size, length)
        bad, codes = not_finite(part), scratch("codes", 4 * packed.size, np.uint8)
        threshold = level = self.threshold
        if threshold is None:
            threshold, level = _threshold_and_level(part if bad is None else np.where(bad, np.float32(0), part))
        levels[0] = level
        _choose(part, np.float32(threshold), codes)
        if bad is not None:
            codes[:part.size][bad] = _NAN
        words = codes.view(np.uint32)
        np.multiply(words, _GATHER, out=words)
        np.right_shift(words, 24, out=words)
        np.copyto(packed, words, casting="unsafe")

    def read(self, data: np.ndarray, start: int, length: int, into: np.ndarray) -> None:
        levels, packed = _parts(data, start, into.size, length)
        fours, values = scratch("table", 1024), scratch("fours", 4 * packed.size)
        np.multiply(_fours(), levels[0], out=fours)
        indices = scratch("indices", packed.size, np.intp)
        np.copyto(indices, packed)
        pairs = fours.view(np.complex128)  # four float32 as one element of 16 bytes: take moves it at once
        np.take(pairs, indices, out=values.view(np.complex128), mode="wrap")  # faster than "raise"; none can be outside
        np.copyto(into, values[:into.size])


def _groups(length: int) -> int:
    return -(-length // GROUP)


def _quarter(length: int) -> int:
    return -(-length // 4)


def _parts(data: np.ndarray, start: int, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The level (as an array of one) and the packed codes of elements [start, start + size), a group or the last."""
    ahead, group = 4 * _groups(length), start // GROUP
    return data[4 * group:4 * group + 4].view(np.float32), data[ahead + start // 4:ahead + start // 4 + _quarter(size)]


def _threshold_and_level(part: np.ndarray) -> tuple[float, float]:
    """From which magnitude on to send, and the mean of what that sends. At least the greatest is sent, if not 0."""
    magnitude, reached = scratch("magnitude", part.size), scratch("below", part.size, np.bool_)
    np.absolute(part, out=magnitude)
    most = float(np.maximum.reduce(magnitude))
    threshold = np.float32(max(min(_MEANS * _sum(magnitude) / part.size, 0.7 * most), _LEAST))
    sent = np.count_nonzero(np.greater_equal(magnitude, threshold, out=reached))
    if not sent:
        return float(threshold), 0.0
    np.subtract(magnitude, threshold, out=magnitude)
    np.maximum(magnitude, constant(0.0)[:part.size], out=magnitude)
    return float(threshold), min(float(threshold) + _sum(magnitude) / sent, most)


def _sum(values: np.ndarray) -> float:
    """inf where the sum is beyond float32. Twice as fast as numpy's sum; levels need no more than its four digits."""
    return float(np.einsum("i->", values))


def _choose(part: np.ndarray, threshold: np.float32, codes: np.ndarray) -> None:
    """The code of each element, 0 behind the last."""
    below, inside = scratch("below", part.size, np.bool_), codes[:part.size]
    codes[part.size:] = 0
    np.less_equal(part, -threshold, out=below)
    np.add(below.view(np.uint8), below.view(np.uint8), out=inside)
    np.greater_equal(part, threshold, out=below)
    np.bitwise_or(inside, below.view(np.uint8), out=inside)


@cache
def _fours() -> np.ndarray:
    """The four values of each byte at level 1: float32, 1024 elements."""
    values = np.array([0.0, 1.0, -1.0, np.nan], np.float32)
    return values[np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3].reshape(-1)
