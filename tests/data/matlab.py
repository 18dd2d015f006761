"""Writes MATLAB 5 files of structures, as MATLAB wrote meta.mat of ILSVRC2012's devkit."""

import struct
import zlib
from collections.abc import Mapping, Sequence

Value = str | int | float | Sequence[int]
HEADER = b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(124) + b"\0\1IM"
INT8, UINT8, UINT16, INT32, UINT32, DOUBLE, MATRIX, COMPRESSED = 1, 2, 4, 5, 6, 9, 14, 15


def element(kind: int, data: bytes) -> bytes:
    if 0 < len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(name: str, number: int, shape: tuple[int, int], *contents: bytes) -> bytes:
    flags, dimensions = struct.pack("<II", number, 0), struct.pack("<ii", *shape)
    parts = (element(UINT32, flags), element(INT32, dimensions), element(INT8, name.encode()), *contents)
    return element(MATRIX, b"".join(parts))


def value(content: Value) -> bytes:
    if isinstance(content, str):
        return matrix("", 4, (1, len(content)), element(UINT16, content.encode("utf-16-le")))
    if isinstance(content, float):
        return matrix("", 6, (1, 1), element(DOUBLE, struct.pack("<d", content)))
    numbers = [content] if isinstance(content, int) else content
    packed = struct.pack(f"<{len(numbers)}H", *numbers)
    return matrix("", 6, (len(numbers), 1), element(UINT16, packed))  # doubles, in as few bytes as they need


def structures(name: str, rows: Sequence[Mapping[str, Value]]) -> bytes:
    fields = list(rows[0])
    names = b"".join(field.encode().ljust(32, b"\0") for field in fields)
    values = [value(row[field]) for row in rows for field in fields]
    return matrix(name, 2, (len(rows), 1), element(INT32, struct.pack("<i", 32)), element(INT8, names), *values)


def file(*variables: bytes, packed: bool = True) -> bytes:
    if not packed:
        return HEADER + b"".join(variables)
    each = (zlib.compress(variable) for variable in variables)
    return HEADER + b"".join(struct.pack("<II", COMPRESSED, len(data)) + data for data in each)
