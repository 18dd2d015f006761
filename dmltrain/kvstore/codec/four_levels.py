"""Two bits an element: +low, +high, -low or -high. Each group of 512 elements has its own two levels.

Magnitudes of at least 1.4 times their group's mean are sent as the high level, which is the mean of these magnitudes;
all others as the low level, the mean of the others. For normally distributed values the residual has an eighth of the
energy, close to the minimum for two bits (Max, "Quantizing for minimum distortion", 1960, table I, N = 4); with the
three levels of two_bits.py it has at least a fifth. Fixed levels cannot suit a whole training, in which gradients
become a hundred times smaller. Groups are small because gradients of neighbouring parameters (a convolution and the
normalization after it) differ in size.

On the wire: ceil(length / 512) low levels, as many high levels (float32), then the codes, four to a byte, the first in
the lowest bits; bit 0: high, bit 1: negative. Groups with a NaN or inf have NaN as both levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec.block import BlockCodec, Codec, Parameter, pack, packed_size, whole_groups
from dmltrain.kvstore.codec.two_bits import TwoBits
from dmltrain.kvstore.scratch import scratch

GROUP = 512  # elements
HIGH_FROM = np.float32(1.4)  # times the group's mean magnitude
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class FourLevels(BlockCodec):
    """Four levels (two magnitudes with signs), computed for each 512 elements from their gradients."""

    name = "2bit"
    number = 5
    size = "0.266n; with a threshold n / 4"
    parameter = Parameter("threshold", 1e-30, 1e30, of_gradients=True)
    needs_residual = True

    @classmethod
    def create(cls, value: float | None) -> Codec:
        """With a threshold: MXNet's three levels; without: levels computed from the gradients."""
        return cls() if value is None else TwoBits(value)

    def nbytes(self, length: int) -> int:
        return 8 * _groups(length) + packed_size(length)

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        low, high, packed = _fields(target, start, block.size, length)
        groups = whole_groups(block, GROUP)
        reached = _find_levels(groups, block.size, low, high)
        codes = scratch("codes", 4 * packed.size, np.uint8)
        codes[block.size :] = 0
        inside, negative = codes[: block.size], scratch("negative", block.size, np.bool_)
        np.less(block.view(np.int32), np.int32(0), out=negative)  # the sign bit, also of -0.0
        np.left_shift(negative.view(np.uint8), np.uint8(1), out=inside)
        np.bitwise_or(inside, reached.reshape(-1)[: block.size].view(np.uint8), out=inside)
        pack(codes, packed)

    def write_and_read(self, block: Array, start: int, target: Array, length: int) -> Array:
        """Bit for bit what `read` would give, computed from the scratch memory that `write` has filled."""
        self.write(block, start, target, length)
        low, high, _ = _fields(target, start, block.size, length)
        levels = scratch("reached", _groups(block.size) * GROUP).reshape(-1, GROUP)
        np.multiply(levels, (high - low)[:, None], out=levels)
        np.add(levels, low[:, None], out=levels)
        values = levels.reshape(-1)[: block.size]
        bits, signs = values.view(np.uint32), scratch("bits", block.size, np.uint32)  # three times as fast as copysign
        np.bitwise_and(block.view(np.uint32), _SIGN, out=signs)
        np.bitwise_or(bits, signs, out=bits)
        return values

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        low, high, packed = _fields(data, start, into.size, length)
        size = _groups(into.size) * GROUP
        indices = scratch("indices", packed.size, np.intp)
        np.copyto(indices, packed)
        signs, steps = (_four_at_once(table, indices, name, size) for name, table in tables().items())
        np.multiply(signs, low[:, None], out=signs)
        np.multiply(steps, (high - low)[:, None], out=steps)
        np.add(signs, steps, out=signs)
        np.copyto(into, signs.reshape(-1)[: into.size])


def _groups(length: int) -> int:
    return -(-length // GROUP)


def _fields(data: Array, start: int, size: int, length: int) -> tuple[Array, Array, Array]:
    """The low levels, the high levels (both (groups,)) and the packed codes of elements [start, start + size)."""
    count, first = _groups(length), start // GROUP
    low, high = (
        data[4 * begin : 4 * (begin + count)].view(np.float32)[first : first + _groups(size)] for begin in (0, count)
    )
    return low, high, data[8 * count + start // 4 : 8 * count + start // 4 + packed_size(size)]


def _find_levels(groups: Array, size: int, low: Array, high: Array) -> Array:
    """Compute the levels of `groups` (n, GROUP), which have `size` elements and then zeros; returns a mask of the
    elements with the high level (bool, n x GROUP)."""
    magnitude = np.absolute(groups, out=scratch("magnitude", groups.size).reshape(groups.shape))
    counts = np.full(len(groups), GROUP, np.float32)
    counts[-1] -= groups.size - size
    total = np.add.reduce(magnitude, axis=1)  # pairwise, as backends/torch/gpu/codecs.py does, on every processor
    reached = np.greater_equal(
        magnitude,
        (HIGH_FROM * (total / counts))[:, None],
        out=scratch("below", groups.size, np.bool_).reshape(groups.shape),
    )
    ones = scratch("reached", groups.size).reshape(groups.shape)  # as float32
    np.copyto(ones, reached)
    number = np.einsum("ij->i", ones)  # the fastest sum, which is exact here
    above = np.multiply(magnitude, ones, out=scratch("above", groups.size).reshape(groups.shape))
    rest = np.add.reduce(np.subtract(magnitude, above, out=magnitude), axis=1)  # without the rounding of an outlier
    np.divide(np.maximum(total - rest, np.float32(0)), np.maximum(number, np.float32(1)), out=high)
    np.divide(rest, np.maximum(counts - number, np.float32(1)), out=low)
    bad = ~np.isfinite(total)
    if bad.any():
        low[bad] = high[bad] = np.nan
    return reached


def _four_at_once(table: Array, indices: Array, name: str, size: int) -> Array:
    """The table's four values for each byte, as (groups, GROUP)."""
    values = scratch(name, size)
    np.take(table, indices, out=values[: 4 * indices.size].view(np.complex128), mode="wrap")
    return values.reshape(-1, GROUP)


@cache
def tables() -> dict[str, Array]:
    """For each byte the factors of its four codes: of the low level, and of high - low. Each table is (256,), with four
    float32 as one element of 16 bytes, which np.take copies at once."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3
    signs = np.where(codes & 2, -1.0, 1.0).astype(np.float32)
    steps = signs * (codes & 1).astype(np.float32)
    return {"low": signs.reshape(-1).view(np.complex128), "step": steps.reshape(-1).view(np.complex128)}
