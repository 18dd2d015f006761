"""Two bits an element: +low, +high, -low or -high, with two levels for each 512 elements that follow the gradients.

What is at least 1.4 times its group's mean magnitude from 0 is sent as the mean of such magnitudes, the rest as the
mean of theirs. Of normal values an eighth of the energy waits in the residual, near the least that two bits allow (Max,
"Quantizing for minimum distortion", 1960, table I, N = 4); with the three levels of two_bits.py it is a fifth at
best. No fixed level suits training's beginning and its end: gradients become a hundred times smaller. Groups are small
because neighbouring parameters (a convolution, the normalisation behind it) have gradients of different size.

On the wire: ceil(length / 512) low levels, as many high ones (float32), then the codes, four a byte, the first in the
lowest bits; bit 0: high, bit 1: negative. Groups with a NaN or inf have NaN as both levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.codec.block import BlockCodec, Codec, Parameter, pack, quarter, whole_groups
from dmltrain.kvstore.codec.two_bits import TwoBits
from dmltrain.kvstore.scratch import scratch

GROUP = 512  # elements
_MEANS = np.float32(1.4)
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class FourLevels(BlockCodec):
    """Four levels for each 512 elements, which follow the gradients."""

    name = "2bit"
    number = 5
    size = "0.266n; with a threshold n / 4"
    parameter = Parameter("threshold", 1e-30, 1e30, of_gradients=True)
    needs_residual = True

    @classmethod
    def made(cls, value: float | None) -> Codec:
        """With a threshold MXNet's three levels, by default levels that follow the gradients."""
        return cls() if value is None else TwoBits(value)

    def nbytes(self, length: int) -> int:
        return 8 * _groups(length) + quarter(length)

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        low, high, packed = _fields(target, start, block.size, length)
        groups = whole_groups(block, GROUP)
        reached = _find_levels(groups, block.size, low, high)
        codes = scratch("codes", 4 * packed.size, np.uint8)
        codes[block.size :] = 0
        inside, negative = codes[: block.size], scratch("negative", block.size, np.bool_)
        np.less(block.view(np.int32), np.int32(0), out=negative)  # the sign bit: of -0.0 too
        np.left_shift(negative.view(np.uint8), np.uint8(1), out=inside)
        np.bitwise_or(inside, reached.reshape(-1)[: block.size].view(np.uint8), out=inside)
        pack(codes, packed)

    def sent(self, block: Array, start: int, target: Array, length: int) -> Array:
        """As `read` would find it, to the bit, from what `write` has at hand."""
        self.write(block, start, target, length)
        low, high, _ = _fields(target, start, block.size, length)
        ways = scratch("chosen", _groups(block.size) * GROUP).reshape(-1, GROUP)
        np.multiply(ways, (high - low)[:, None], out=ways)
        np.add(ways, low[:, None], out=ways)
        values = ways.reshape(-1)[: block.size]
        bits, signs = values.view(np.uint32), scratch("bits", block.size, np.uint32)  # a third of what copysign takes
        np.bitwise_and(block.view(np.uint32), _SIGN, out=signs)
        np.bitwise_or(bits, signs, out=bits)
        return values

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        low, high, packed = _fields(data, start, into.size, length)
        size = _groups(into.size) * GROUP
        indices = scratch("indices", packed.size, np.intp)
        np.copyto(indices, packed)
        signs, steps = (_four_at_once(table, indices, name, size) for name, table in _tables().items())
        np.multiply(signs, low[:, None], out=signs)
        np.multiply(steps, (high - low)[:, None], out=steps)
        np.add(signs, steps, out=signs)
        np.copyto(into, signs.reshape(-1)[: into.size])


def _groups(length: int) -> int:
    return -(-length // GROUP)


def _fields(data: Array, start: int, size: int, length: int) -> tuple[Array, Array, Array]:
    """The low and the high levels (groups,) and the packed codes of elements [start, start + size)."""
    count, first = _groups(length), start // GROUP
    low, high = (
        data[4 * begin : 4 * (begin + count)].view(np.float32)[first : first + _groups(size)] for begin in (0, count)
    )
    return low, high, data[8 * count + start // 4 : 8 * count + start // 4 + quarter(size)]


def _find_levels(groups: Array, size: int, low: Array, high: Array) -> Array:
    """Write the levels of `groups` (n, GROUP), whose last ends with zeros behind `size` elements in all; returns where
    the high one is meant (bool, as `groups`)."""
    magnitude = np.absolute(groups, out=scratch("magnitude", groups.size).reshape(groups.shape))
    counts = np.full(len(groups), GROUP, np.float32)
    counts[-1] -= groups.size - size
    total = np.einsum("ij->i", magnitude)
    reached = np.greater_equal(
        magnitude,
        (_MEANS * (total / counts))[:, None],
        out=scratch("below", groups.size, np.bool_).reshape(groups.shape),
    )
    chosen = scratch("chosen", groups.size).reshape(groups.shape)
    np.copyto(chosen, reached)
    many, above = np.einsum("ij->i", chosen), np.einsum("ij,ij->i", magnitude, chosen)
    np.divide(above, np.maximum(many, np.float32(1)), out=high)
    np.divide(np.maximum(total - above, np.float32(0)), np.maximum(counts - many, np.float32(1)), out=low)
    bad = ~np.isfinite(total)
    if bad.any():
        low[bad] = high[bad] = np.nan
    return reached


def _four_at_once(table: Array, indices: Array, name: str, size: int) -> Array:
    """The table's four values of each byte, as (groups, GROUP)."""
    values = scratch(name, size)
    np.take(table, indices, out=values[: 4 * indices.size].view(np.complex128), mode="wrap")
    return values.reshape(-1, GROUP)


@cache
def _tables() -> dict[str, Array]:
    """For each byte its four codes' factors of the low level, and of the way from there to the high one: (256,) of four
    float32 as one element of 16 bytes, which take moves at once."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3
    signs = np.where(codes & 2, -1.0, 1.0).astype(np.float32)
    steps = signs * (codes & 1).astype(np.float32)
    return {"lows": signs.reshape(-1).view(np.complex128), "ways": steps.reshape(-1).view(np.complex128)}
