"""Reads and writes MXNet's files of named arrays (PREFIX-0001.params of save_checkpoint, gluon's export, mx.nd.save).

MXNet's own reader trusts the lengths in a file: with a damaged one it takes gigabytes or crashes. Layout, little-endian
(MXNet 1.9.1, src/ndarray/ndarray.cc, NDArray::Load and LegacyLoad):

    u64 0x112, u64 0, u64 number of arrays, arrays, u64 number of names (or 0), names (u64 length, UTF-8)
    array: u32 version, i32 storage (version 2 on; 0 is dense), shape, i32 device, i32 its number, i32 type, elements
    shape: u32 dimensions, i64 each; before version 1 the version is the number of dimensions, u32 each
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array

LIST = 0x112
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA  # versions of an array; 3 can have no dimensions
TYPES = (
    *("float32", "float64", "float16", "uint8", "int32", "int8", "int64"),
    *("bool", "int16", "uint16", "uint32", "uint64"),
)
MAX_DIMENSIONS = 32
DENSE = 0  # the storage of an array
CPU = (1, 0)  # the device that it was on, and its number


def read(content: bytes) -> dict[str, Array]:
    """The arrays by name; what follows them is not read. Raises ValueError if the file is another one, damaged, or
    without names."""
    rest = _Rest(content)
    if rest.numbers("<QQ")[0] != LIST:
        raise ValueError("it does not start as a file of arrays")
    arrays = [_array(rest) for _ in range(rest.count())]
    names = [bytes(rest.take(*rest.numbers("<Q"))).decode() for _ in range(rest.count())]
    if arrays and not names:
        raise ValueError("its arrays have no names")
    if len(names) != len(arrays):
        raise ValueError(f"{len(arrays)} arrays have {len(names)} names")
    return dict(zip(names, arrays, strict=True))


def write(arrays: Mapping[str, Array]) -> bytes:
    """The content of a file of named arrays, each with one dimension at least, as MXNet 0.11 and later versions read
    it."""
    parts = [struct.pack("<QQQ", LIST, 0, len(arrays))]
    for array in arrays.values():
        parts.append(struct.pack(f"<IiI{array.ndim}q", V2, DENSE, array.ndim, *array.shape))
        parts.append(struct.pack("<iii", *CPU, TYPES.index(array.dtype.name)))
        parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    parts.append(struct.pack("<Q", len(arrays)))
    for name in arrays:
        parts.append(struct.pack("<Q", len(name.encode())) + name.encode())
    return b"".join(parts)


@dataclass
class _Rest:
    """What is left to read."""

    content: bytes
    place: int = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.content) - self.place:
            raise ValueError(f"{size} bytes expected at byte {self.place} of {len(self.content)}")
        self.place += size
        return memoryview(self.content)[self.place - size : self.place]

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def count(self) -> int:
        """How many arrays or names follow; each takes 8 bytes at least."""
        (count,) = self.numbers("<Q")
        if 8 * count > len(self.content) - self.place:
            raise ValueError(f"{count} arrays or names expected at byte {self.place} of {len(self.content)}")
        return count


def _array(rest: _Rest) -> Array:
    (version,) = rest.numbers("<I")
    if version in (V2, V3) and rest.numbers("<i") != (DENSE,):
        raise ValueError("it has a sparse array")
    dimensions = rest.numbers("<I")[0] if version in (V1, V2, V3) else version
    if dimensions > MAX_DIMENSIONS or (dimensions == 0 and version != V3):
        raise ValueError(f"it has an array of {dimensions} dimensions")
    shape = rest.numbers(f"<{dimensions}{'q' if version in (V1, V2, V3) else 'I'}")
    _, _, kind = rest.numbers("<iii")
    if not 0 <= kind < len(TYPES) or min(shape, default=0) < 0:
        raise ValueError(f"it has an array of shape {shape} and type {kind}")
    dtype = np.dtype(TYPES[kind]).newbyteorder("<")
    return np.frombuffer(rest.take(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
