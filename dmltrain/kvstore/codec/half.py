"""Two bytes an element: bf16 (upper half of float32) and fp16 (IEEE 754 binary16), rounded to nearest, ties to even.

Neither needs a residual: the relative error is at most 2^-9 (bf16) or 2^-11 (fp16) and has either sign. The range of
fp16 is small: magnitudes of 65520 and more become inf, below 6.1e-5 they lose precision, and up to 3e-8 they become 0.

numpy's conversion to float16 takes 16 times as long for small values, which gradients are, as for values around 1,
because each sets the processor's underflow flag. That is why this module works on the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec.block import BlockCodec, constant, nonfinite_mask
from dmltrain.kvstore.scratch import scratch

_SIGN = np.uint16(0x8000)
_EXPONENT = np.uint32(0x7F800000)
_LEAST_NORMAL = 113 << 23  # 2^-14, of binary16
_13_BITS = np.uint32(13 << 23)  # added to an exponent: times 2^13
_BIAS = np.uint16((113 << 10) & 0xFFFF)


@dataclass(frozen=True)
class BFloat16(BlockCodec):
    """The range of float32, 8 bits of precision."""

    name = "bf16"
    number = 2
    needs_residual = False
    size = "2n"

    def nbytes(self, length: int) -> int:
        return 2 * length

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        bits, rounded = block.view(np.uint32), scratch("bits", block.size, np.uint32)
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        out = target.view(np.uint16)[start : start + block.size]
        np.copyto(out, rounded, casting="unsafe")
        if nonfinite_mask(block) is not None:  # rounding can carry a NaN's bits into the sign, or turn it into inf
            out[np.isnan(block)] = 0x7FC0

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        bits = into.view(np.uint32)
        np.copyto(bits, data.view(np.uint16)[start : start + into.size])
        np.left_shift(bits, 16, out=bits)


@dataclass(frozen=True)
class Float16(BlockCodec):
    """11 bits of precision from 6.1e-5 to 65504."""

    name = "fp16"
    number = 3
    needs_residual = False
    size = "2n"

    def nbytes(self, length: int) -> int:
        return 2 * length

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        out = target.view(np.uint16)[start : start + block.size]
        magnitude = scratch("magnitude", block.size)
        np.absolute(block, out=magnitude)
        if np.maximum.reduce(magnitude) < 65536.0:
            _round(magnitude, out)
        else:  # everything from 65536 on rounds to inf
            _round(np.fmin(magnitude, np.float32(65536.0)), out)
            out[np.isnan(block)] = 0x7E00
        high, signs = scratch("bits", block.size, np.uint32), scratch("signs", block.size, np.uint16)
        np.right_shift(block.view(np.uint32), 16, out=high)
        np.copyto(signs, high, casting="unsafe")
        np.bitwise_and(signs, _SIGN, out=signs)
        np.bitwise_or(out, signs, out=out)

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        indices = scratch("indices", into.size, np.intp)
        np.copyto(indices, data.view(np.uint16)[start : start + into.size])
        np.take(all_halves(), indices, out=into, mode="wrap")  # twice as fast as "raise"; all are inside


def _round(magnitude: Array, out: Array) -> None:
    """Write the binary16 bits of values from 0 to 65536 to `out` (uint16).

    Adding 2^(13 + e) to a value with exponent e rounds it to the 10 fraction bits of binary16 and moves these to the
    lowest bits of the sum. Values below 2^-14 are rounded like those of exponent -14. The bits above the lowest 16 are
    dropped.
    """
    exponent, addend = scratch("bits", out.size, np.uint32), scratch("addend", out.size, np.uint32)
    np.bitwise_and(magnitude.view(np.uint32), _EXPONENT, out=exponent)
    np.maximum(exponent, constant(_LEAST_NORMAL, np.uint32)[: out.size], out=exponent)
    np.add(exponent, _13_BITS, out=addend)
    total = addend.view(np.float32)
    np.add(total, magnitude, out=total)
    np.right_shift(exponent, 13, out=exponent)
    np.add(addend, exponent, out=addend)
    np.copyto(out, addend, casting="unsafe")
    np.subtract(out, _BIAS, out=out)


@cache
def all_halves() -> Array:
    """The values of all 65,536 bit patterns of binary16, as float32."""
    return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
