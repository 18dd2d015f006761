"""What a codec is, and the pass over memory that most of them share: block by block, in the cache.

Theory of operation. A codec turns a float32 array into fewer bytes and back. With a residual it has error feedback
(Seide et al., "1-bit stochastic gradient descent", 2014, section 2; Karimireddy et al., "Error feedback fixes SignSGD",
2019, algorithm 1): what is encoded is source + residual, and what the bytes do not say stays in the residual for the
next time, so that nothing is lost, only late. A block codec does all steps of a block while it is in the cache: memory
sees one read of the source, one read and one write of the residual, one write of the bytes.

The bytes are little-endian, as are all hosts that dmltrain runs on. They depend on the values only, neither on
alignment nor on the thread, so every run gives the same bits. Scratch belongs to the thread: any number of threads may
use one codec.

What is not finite is never hidden. bf16 and fp16 carry it like any value; int8 and 2bit decode the 512 elements around
it to NaN, 2bit with a threshold and topk the element itself (topk: inf as inf), just as training without a codec would
show it. In the residual it is replaced by 0: after a batch that overflowed, and that a loss scaler may have skipped,
the next is right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.scratch import BLOCK, scratch


@dataclass(frozen=True)
class Parameter:
    """The one number that a type of codec takes, from `least` to `most`."""

    name: str
    least: float
    most: float
    of_gradients: bool = False  # in the unit of the gradients, as opposed to a plain number

    def checked(self, codec: str, value: object) -> float:
        """Raises ValueError."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.least <= value <= self.most:
            raise ValueError(
                f"gradient compression {codec}: {self.name} is {value!r}, expected a number "
                f"from {self.least:g} to {self.most:g}"
            )
        return float(value)


class Codec(ABC):
    """One type with its parameters. Arrays are contiguous and one-dimensional; `length` is in float32 elements.

    ValueError where the bytes are not as many as nbytes(length).
    """

    name: ClassVar[str]  # as in --gc-type
    number: ClassVar[int]  # on the wire; numbers below 2 are types of elements (transport/wire.py)
    size: ClassVar[str]  # in bytes of n elements, for the documentation
    needs_residual: ClassVar[bool]  # without a residual training suffers
    parameter: ClassVar[Parameter | None] = None
    fixed_size: ClassVar[bool] = True  # the size does not depend on the parameter

    @classmethod
    def made(cls, value: float | None) -> Codec:
        """The codec with that value of its parameter; None: the default."""
        return cls() if value is None else cls(value)  # type: ignore[call-arg]

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """How many bytes `length` elements take; it depends on nothing else."""

    @abstractmethod
    def encode(self, source: Array, target: Array, residual: Array | None = None) -> None:
        """Write source + residual to `target` (uint8), and what that does not say to `residual` (float32).

        `source` (float32) stays as it is. Without a residual the rest is lost.
        """

    @abstractmethod
    def decode(self, data: Array, out: Array) -> None:
        """out = the values of `data` (uint8)."""

    @abstractmethod
    def add(self, data: Array, total: Array) -> None:
        """total += the values of `data` (uint8): to the bit what decoding and adding would give."""

    def of_sum(self, num_workers: int) -> Codec:
        """The codec for the sum of the values of that many workers."""
        return self

    def check(self, data: Array, length: int) -> None:
        """Raises ValueError unless `data` has the size of `length` elements."""
        if data.size != self.nbytes(length):
            raise ValueError(f"{self.name}: {length} elements take {self.nbytes(length)} bytes, not {data.size}")


class BlockCodec(Codec):
    """A codec whose elements are independent, or depend on their own block only."""

    @abstractmethod
    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        """Encode elements [start, start + block.size) of `length` at their positions in `target`."""

    @abstractmethod
    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        """Decode elements [start, start + into.size) of `length`."""

    def sent(self, block: Array, start: int, target: Array, length: int) -> Array:
        """`write`; returns what `read` would give, in this thread's memory."""
        self.write(block, start, target, length)
        values = scratch("sent", block.size)
        self.read(target, start, length, values)
        return values

    def encode(self, source: Array, target: Array, residual: Array | None = None) -> None:
        self.check(target, source.size)
        with np.errstate(all="ignore"):  # overflow, inf - inf: what becomes of them is said above
            for start, stop in blocks(source.size):
                if residual is None:
                    self.write(source[start:stop], start, target, source.size)
                else:
                    self._write_all(source[start:stop], start, target, source.size, residual[start:stop])

    def _write_all(self, block: Array, start: int, target: Array, length: int, left: Array) -> None:
        np.add(block, left, out=left)
        np.subtract(left, self.sent(left, start, target, length), out=left)
        forget_what_is_not_finite(left)

    def decode(self, data: Array, out: Array) -> None:
        self.check(data, out.size)
        with np.errstate(all="ignore"):
            for start, stop in blocks(out.size):
                self.read(data, start, out.size, out[start:stop])

    def add(self, data: Array, total: Array) -> None:
        self.check(data, total.size)
        with np.errstate(all="ignore"):
            for start, stop in blocks(total.size):
                values = scratch("sent", stop - start)
                self.read(data, start, total.size, values)
                block = total[start:stop]
                np.add(block, values, out=block)


def blocks(length: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each block."""
    for start in range(0, length, BLOCK):
        yield start, min(start + BLOCK, length)


def whole_groups(block: Array, size: int) -> Array:
    """`block` as (groups, size), filled up with zeros where it ends within a group."""
    if block.size % size == 0:
        return block.reshape(-1, size)
    filled = scratch("filled", -(-block.size // size) * size)
    np.copyto(filled[: block.size], block)
    filled[block.size :] = 0.0
    return filled.reshape(-1, size)


def quarter(length: int) -> int:
    """Bytes of so many codes of two bits."""
    return -(-length // 4)


def pack(codes: Array, packed: Array) -> None:
    """Write codes of two bits (uint8, 4 for each byte of `packed`), which are lost, four a byte, the first in the
    lowest bits."""
    words = codes.view(np.uint32)
    np.multiply(words, _GATHER, out=words)
    np.right_shift(words, 24, out=words)
    np.copyto(packed, words, casting="unsafe")


_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)  # times four codes in four bytes: all in the highest byte


def forget_what_is_not_finite(left: Array) -> None:
    """Set NaN and inf to 0, in a block of a residual."""
    bad = not_finite(left)
    if bad is not None:
        left[bad] = 0.0


def not_finite(block: Array) -> Array | None:
    """Where a block is NaN or inf (bool, as long as the block), or None if nowhere."""
    finite = np.isfinite(block, out=scratch("finite", block.size, np.bool_))
    return None if finite.all() else ~finite


@cache
def constant(value: float, dtype: type = np.float32) -> Array:
    """BLOCK times one value, read-only: with it numpy's maximum takes a fifth of the time that a scalar takes."""
    array: Array = np.full(BLOCK, value, dtype)
    array.flags.writeable = False
    return array
