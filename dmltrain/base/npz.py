"""Zip archives of arrays from untrusted bytes: numpy's npz, and the checks for any archive before a library opens it.

Only members that are stored, not compressed, are accepted; numpy.savez and torch.save write such members. So what is
read takes no more memory than the file. A compressed member could become a thousand times as large.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from dmltrain.base.arrays import Array

MAX_DIRECTORY = 64 << 20  # bytes of an archive's table of contents: a server's 131,072 slices with six arrays each
_END = struct.Struct("<4s8xIIH")  # the record at the end: size and offset of the table of contents, comment
_LOCATOR = struct.Struct("<4s4xQ4x")  # of an archive with 8-byte numbers: before that record; offset of the next one
_LARGE_END = struct.Struct("<4s36xQQ")  # the record at the end with 8-byte numbers
_Bytes = bytes | bytearray


def check(content: _Bytes) -> None:
    """Raises ValueError unless `content` is an archive whose members are stored and take no more bytes than it has."""
    _check_directory(content)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
    except Exception as error:  # zipfile raises many types of errors for damaged files
        raise ValueError(f"its table of contents is unreadable: {error}") from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{member.filename[:80]!r} in it is compressed; expected an archive as dmltrain writes it")
    if (total := sum(member.file_size for member in members)) > len(content):
        raise ValueError(f"its members have {total} bytes, more than its own {len(content)}")


def read(content: _Bytes) -> Mapping[str, Array]:
    """The arrays of an npz by name. Raises ValueError if it is damaged, compressed, or has other content."""
    check(content)
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
                arrays[member.filename.removesuffix(".npy")] = _array(archive.read(member))
    except Exception as error:  # zipfile and numpy raise many types of errors for damaged files
        raise ValueError(f"not an archive of arrays: {str(error)[:200]}") from error
    return arrays


def pack(arrays: Mapping[str, Array]) -> bytes:
    """An npz of arrays by name."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def shapes(content: _Bytes) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the arrays of an npz by name, without their elements. Raises ValueError like `read`."""
    check(content)
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    shapes_by_name[member.filename.removesuffix(".npy")] = _header(stream)[0]
    except Exception as error:  # zipfile and numpy raise many types of errors for damaged files
        raise ValueError(f"not an archive of arrays: {str(error)[:200]}") from error
    return shapes_by_name


def _check_directory(content: _Bytes) -> None:
    """Check the place of the table of contents before a library reads it: it has to be right before the end record,
    where all readers find the same one."""
    end = content.rfind(b"PK\5\6", max(0, len(content) - 65_557))  # 22 bytes, and a comment of up to 65,535
    if end < 0 or end + 22 > len(content):
        raise ValueError("the end of the archive is missing or altered")
    _, size, offset, comment = _END.unpack_from(content, end)
    place = end
    if end >= _LOCATOR.size and content[end - 20 : end - 16] == b"PK\6\7":
        _, place = _LOCATOR.unpack_from(content, end - _LOCATOR.size)
        if place + 56 != end - _LOCATOR.size or content[place : place + 4] != b"PK\6\6":
            raise ValueError("the end of the archive is altered")
        _, size, offset = _LARGE_END.unpack_from(content, place)
    if size > MAX_DIRECTORY:
        raise ValueError(f"its table of contents has {size} bytes, the limit is {MAX_DIRECTORY}")
    if offset + size != place or end + 22 + comment != len(content):
        raise ValueError("its table of contents is not at its end")


def _array(data: bytes) -> Array:
    """The array of a .npy file. Raises ValueError, or what numpy raises for a damaged header."""
    stream = io.BytesIO(data)
    shape, by_columns, dtype = _header(stream)
    actual, expected = len(data) - stream.tell(), math.prod(shape) * dtype.itemsize
    if dtype.kind not in "biuf" or min(shape, default=0) < 0 or actual != expected:
        raise ValueError(f"{actual} bytes of {str(dtype)[:50]} for {shape}, expected {expected} bytes of numbers")
    array = np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order="F" if by_columns else "C")
    return array.copy(order="K")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and type of the array in a .npy file. Raises like `_array`."""
    version = np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array in version {version} of its format, expected 1.0 or 2.0")
    read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(stream)
    return shape, by_columns, dtype
