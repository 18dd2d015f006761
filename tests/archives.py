"""Tar archives that are made for a test, mutated zip archives whose checksums are right, files that are refused."""

import contextlib
import io
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping

import pytest

_ENTRY = struct.Struct("<4s12xIII")  # a table's entry: signature, ... checksum, sizes
_NAMES = struct.Struct("<HHH8xI")  # lengths of name, extra field and comment, ... place of the member
_MEMBER = struct.Struct("<4s22xHH")  # a member: signature, ... lengths of name and extra field


def tar(contents: Mapping[str, bytes | tarfile.TarInfo], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive of plain files, or of whatever TarInfo says."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in contents.items():
            info = tarfile.TarInfo(name) if isinstance(data, bytes) else data
            info.size = len(data) if isinstance(data, bytes) else 0
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return buffer.getvalue()


def repacked(data: bytes) -> bytes:
    """The zip archive with the checksum of each stored member that can be found, so that a mutation reaches what is
    behind them."""
    fixed, place = bytearray(data), 0
    while (place := fixed.find(b"PK\1\2", place)) >= 0 and place + 46 <= len(fixed):
        size = _ENTRY.unpack_from(fixed, place)[3]
        start = _NAMES.unpack_from(fixed, place + 28)[3]
        if start + 30 <= len(fixed):
            _, name, extra = _MEMBER.unpack_from(fixed, start)
            content = fixed[start + 30 + name + extra : start + 30 + name + extra + size]
            checksum = struct.pack("<I", zlib.crc32(content))
            fixed[place + 16 : place + 20] = fixed[start + 14 : start + 18] = checksum
        place += 4
    return bytes(fixed)


@contextlib.contextmanager
def little_memory(most: int) -> Iterator[None]:
    """The block has less than so many bytes of Python's at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refused(read: Callable[[bytes], object], content: bytes, reason: str, memory: int) -> None:
    """`read` raises ValueError for this reason, and takes less memory on the way."""
    with little_memory(memory), pytest.raises(ValueError, match=reason):
        read(content)
