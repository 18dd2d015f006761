"""Reads structures from a MATLAB 5 file, such as meta.mat of ILSVRC2012's devkit, from untrusted bytes.

Of the format ("MAT-File Format", MathWorks, Level 5) this reads what that file has: structures, cells, texts and real
numbers, compressed or not, in little-endian order. SciPy reads all of it, and is 35 MB for this one file of 20 KB.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.readers.data_file import Damaged

HEADER_BYTES = 128
MAX_UNPACKED = 16 << 20  # bytes
MAX_DEPTH = 8  # structures and cells within each other; meta.mat has 2
MATRIX, COMPRESSED = 14, 15
CELL, STRUCTURE, TEXT = 1, 2, 4  # classes of matrices
NUMBERS = range(6, 16)
TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8", 16: "u1"}
DAMAGE = (struct.error, zlib.error, LookupError, TypeError, ValueError, OverflowError, StopIteration)  # what it causes
TYPES[17] = "<u2"  # 16: UTF-8, 17: UTF-16


class Element(NamedTuple):
    """A type and its bytes."""

    kind: int
    data: memoryview


def read(content: bytes) -> dict[str, Any]:
    """The variables by name: a structure is a list of dicts, a cell a list, a text a str, numbers a flat array.

    Raises Damaged.
    """
    if content[124:128] != b"\0\1IM":
        raise Damaged("not a MATLAB 5 file in little-endian order")
    variables = {}
    try:
        for element in _elements(memoryview(content)[HEADER_BYTES:]):
            name, value = _matrix(_unpacked(element).data, MAX_DEPTH)
            variables[name] = value
    except DAMAGE as error:
        raise Damaged(f"damaged MATLAB file: {type(error).__name__} {error}") from None
    return variables


def _elements(data: memoryview) -> Iterator[Element]:
    """One after another, each padded to eight bytes (but those that are compressed). ValueError: one is not whole."""
    while data:
        kind, size = struct.unpack_from("<II", data)
        if kind >> 16:  # up to four bytes, within the tag
            kind, size, start, end = kind & 0xFFFF, kind >> 16, 4, 8
        else:
            start, end = 8, 8 + (size if kind == COMPRESSED else -(-size // 8) * 8)
        if start + size > min(end, len(data)):
            raise ValueError(f"an element of {size} bytes in {len(data)}")
        yield Element(kind, data[start : start + size])
        data = data[end:]


def _unpacked(element: Element) -> Element:
    if element.kind != COMPRESSED:
        return element
    unpacked = zlib.decompressobj().decompress(element.data, MAX_UNPACKED)
    return next(_elements(memoryview(unpacked)))


def _matrix(data: memoryview, depth: int) -> tuple[str, Any]:
    """Name and value of a matrix."""
    if not data:
        return "", []
    if not depth:
        raise ValueError("structures within structures without end")
    elements = _elements(data)
    kind = _numbers(next(elements))[0] & 0xFF
    count = math.prod(map(int, _numbers(next(elements))))
    name = bytes(next(elements).data).decode("latin1")
    if kind == STRUCTURE:
        return name, _structures(elements, count, len(data), depth)
    if kind == CELL:
        return name, [_matrix(_checked(element), depth - 1)[1] for element in elements]
    values = next(elements)
    if kind == TEXT:
        encoding = {16: "utf-8", 4: "utf-16-le", 17: "utf-16-le"}.get(values.kind, "latin1")
        return name, bytes(values.data).decode(encoding)
    if kind not in NUMBERS:
        raise ValueError(f"class {kind}")
    return name, _numbers(values)


def _structures(elements: Iterator[Element], count: int, size: int, depth: int) -> list[dict[str, Any]]:
    width = int(_numbers(next(elements))[0])
    text = bytes(next(elements).data)
    if not 0 < width <= len(text) or not 0 <= count <= size // 8:  # each field has a tag of eight bytes
        raise ValueError(f"{count} structures, names of {width} characters")
    names = [text[start : start + width].partition(b"\0")[0].decode("latin1") for start in range(0, len(text), width)]
    return [{name: _matrix(_checked(next(elements)), depth - 1)[1] for name in names} for _ in range(count)]


def _checked(element: Element) -> memoryview:
    if element.kind != MATRIX:
        raise ValueError(f"an element of type {element.kind}")
    return element.data


def _numbers(element: Element) -> Array:
    return np.frombuffer(element.data, TYPES[element.kind])
