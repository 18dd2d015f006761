"""The interface of a codec, and the base class of codecs that work block by block in the cache.

Theory of operation. A codec turns a float32 array into fewer bytes and back. A residual adds error feedback (Seide et
al., "1-bit stochastic gradient descent", 2014, section 2; Karimireddy et al., "Error feedback fixes SignSGD", 2019,
algorithm 1): the codec encodes source + residual and stores the error in the residual, which is added to the next
gradient. Nothing is lost, only delayed. A block codec does all steps of a block while the block is in the cache. Memory
traffic is one read of the source, one read and one write of the residual, and one write of the bytes.

The bytes are little-endian, like all hosts that dmltrain runs on. They depend on the values alone, not on alignment or
thread, so every run gives the same bits. Each thread has its own scratch memory: any number of threads may use one
codec.

Values that are not finite stay visible, as in training without a codec. bf16 and fp16 keep them. int8 and 2bit decode
their whole group of 512 elements to NaN. 2bit with a threshold decodes the element to NaN; topk keeps it. In the
residual they are replaced by 0, so the batch after an overflow, which a loss scaler may have skipped, is not affected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.scratch import BLOCK, scratch


@dataclass(frozen=True)
class Parameter:
    """The parameter of a codec: a number from `minimum` to `maximum`."""

    name: str
    minimum: float
    maximum: float
    of_gradients: bool = False  # in the unit of the gradients; else dimensionless

    def checked(self, codec: str, value: object) -> float:
        """The value as a float. Raises ValueError when it is not a number in the range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.minimum <= value <= self.maximum:
            raise ValueError(
                f"gradient compression {codec}: {self.name} is {value!r}, expected a number "
                f"from {self.minimum:g} to {self.maximum:g}"
            )
        return float(value)


class Codec(ABC):
    """A codec with its parameter. Arrays are contiguous and one-dimensional; `length` counts float32 elements.

    encode, decode and add raise ValueError unless the encoded array has nbytes(length) bytes.
    """

    name: ClassVar[str]  # as in --gc-type
    number: ClassVar[int]  # on the wire; numbers below 2 are element types (transport/wire.py)
    size: ClassVar[str]  # bytes for n elements, a formula for the documentation
    needs_residual: ClassVar[bool]  # without a residual, training loses accuracy
    parameter: ClassVar[Parameter | None] = None
    fixed_size: ClassVar[bool] = True  # the size does not depend on the parameter

    @classmethod
    def create(cls, value: float | None) -> Codec:
        """The codec with this value of its parameter; None: the default."""
        return cls() if value is None else cls(value)  # type: ignore[call-arg]

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Bytes that `length` elements take when encoded."""

    @abstractmethod
    def encode(self, source: Array, target: Array, residual: Array | None = None) -> None:
        """Encode source + residual into `target` (uint8), and store the error in `residual` (float32).

        `source` (float32) is not changed. Without a residual the error is lost.
        """

    @abstractmethod
    def decode(self, data: Array, out: Array) -> None:
        """out = the values of `data` (uint8)."""

    @abstractmethod
    def add(self, data: Array, total: Array) -> None:
        """total += the values of `data` (uint8), bit for bit as if they were decoded and added."""

    def of_sum(self, num_workers: int) -> Codec:
        """The codec for a sum over this many workers."""
        return self

    def check(self, data: Array, length: int) -> None:
        """Raises ValueError unless `data` has nbytes(length) bytes."""
        if data.size != self.nbytes(length):
            raise ValueError(f"{self.name}: {length} elements take {self.nbytes(length)} bytes, not {data.size}")

    def check_sent(self, data: Array, length: int) -> None:
        """Raises ValueError unless `data` of another process can be decoded."""
        self.check(data, length)


class BlockCodec(Codec):
    """A codec that encodes each block of elements independently of the others."""

    @abstractmethod
    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        """Encode elements [start, start + block.size) of an array of `length` into their place in `target`."""

    @abstractmethod
    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        """Decode elements [start, start + into.size) of an array of `length`."""

    def write_and_read(self, block: Array, start: int, target: Array, length: int) -> Array:
        """Encode a block as `write` does, and return the values that `read` would give, in this thread's scratch."""
        self.write(block, start, target, length)
        values = scratch("decoded", block.size)
        self.read(target, start, length, values)
        return values

    def encode(self, source: Array, target: Array, residual: Array | None = None) -> None:
        self.check(target, source.size)
        with np.errstate(all="ignore"):  # overflow, inf - inf: see "not finite" above
            for start, stop in blocks(source.size):
                if residual is None:
                    self.write(source[start:stop], start, target, source.size)
                else:
                    self._write_all(source[start:stop], start, target, source.size, residual[start:stop])

    def _write_all(self, block: Array, start: int, target: Array, length: int, residual: Array) -> None:
        np.add(block, residual, out=residual)
        np.subtract(residual, self.write_and_read(residual, start, target, length), out=residual)
        zero_nonfinite(residual)

    def decode(self, data: Array, out: Array) -> None:
        self.check(data, out.size)
        with np.errstate(all="ignore"):
            for start, stop in blocks(out.size):
                self.read(data, start, out.size, out[start:stop])

    def add(self, data: Array, total: Array) -> None:
        self.check(data, total.size)
        with np.errstate(all="ignore"):
            for start, stop in blocks(total.size):
                values = scratch("decoded", stop - start)
                self.read(data, start, total.size, values)
                block = total[start:stop]
                np.add(block, values, out=block)


def blocks(length: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each block."""
    for start in range(0, length, BLOCK):
        yield start, min(start + BLOCK, length)


def whole_groups(block: Array, size: int) -> Array:
    """`block` as (groups, size), padded with zeros at the end."""
    if block.size % size == 0:
        return block.reshape(-1, size)
    padded = scratch("padded", -(-block.size // size) * size)
    np.copyto(padded[: block.size], block)
    padded[block.size :] = 0.0
    return padded.reshape(-1, size)


def packed_size(length: int) -> int:
    """Bytes that `length` codes of two bits take."""
    return -(-length // 4)


def pack(codes: Array, packed: Array) -> None:
    """Pack codes of two bits (uint8) four to a byte, the first in the lowest bits. Overwrites `codes`, which has four
    elements for each byte of `packed`."""
    words = codes.view(np.uint32)
    np.multiply(words, _GATHER, out=words)
    np.right_shift(words, 24, out=words)
    np.copyto(packed, words, casting="unsafe")


_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)  # multiplication moves four bytes' codes to the highest byte


def zero_nonfinite(block: Array) -> None:
    """Set NaN and inf to 0."""
    mask = nonfinite_mask(block)
    if mask is not None:
        block[mask] = 0.0


def nonfinite_mask(block: Array) -> Array | None:
    """True where a block is NaN or inf (bool, block.size); None if all elements are finite."""
    finite = np.isfinite(block, out=scratch("finite", block.size, np.bool_))
    return None if finite.all() else ~finite


@cache
def constant(value: float, dtype: type = np.float32) -> Array:
    """A read-only array of BLOCK equal values: with it numpy's maximum is five times as fast as with a scalar."""
    array: Array = np.full(BLOCK, value, dtype)
    array.flags.writeable = False
    return array
