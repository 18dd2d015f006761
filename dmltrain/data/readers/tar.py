"""The headers of a tar archive: where each regular file in it lies. Nothing is unpacked.

POSIX ustar, and what GNU tar and pax add to it for long names and large files. Python's tarfile takes 30 microseconds
for each of ILSVRC12's 1,281,167 headers and keeps them; this takes a few and keeps none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from dmltrain.data.readers.data_file import Damaged

BLOCK = 512
HEADER = struct.Struct("100s24x12s12x8sc100s6s82x155s12x")  # name, size, checksum, type, link, magic, prefix
MAX_EXTENSION = 1 << 16  # bytes of a long name or of pax records
REGULAR, LONG, ABOUT_NEXT = b"0\0007", b"xL", b"xLgK"  # types of headers
AGAIN = "copy or download it again"


class TarMember(NamedTuple):
    """A regular file in an archive."""

    name: bytes
    offset: int
    size: int


class Bytes(Protocol):
    """Where an archive is: a file, or bytes in memory."""

    size: int

    def read(self, offset: int, count: int) -> bytes: ...


def members(file: Bytes, start: int = 0, end: int | None = None) -> Iterator[TarMember]:
    """The regular files of the archive that lies from `start` to `end` in `file`. Raises Damaged at the first header
    that is not as it should be, and if the archive has no end mark."""
    end = file.size if end is None else end
    place = start
    extended: dict[str, Any] = {}
    while True:
        if place + BLOCK > end:
            raise Damaged(f"the archive ends at offset {end} without its end mark: it is truncated; {AGAIN}")
        block = file.read(place, BLOCK)
        if not block.strip(b"\0"):
            return
        name, size, kind = header(block, place)
        content = place + BLOCK
        if kind in LONG:
            extended |= _extension(file, content, size, end, kind)
        elif kind in REGULAR:
            size = extended.get("size", size)
            yield _within(TarMember(extended.get("path", name), content, size), end)
        if kind not in ABOUT_NEXT:
            extended = {}
        place = content + -(-size // BLOCK) * BLOCK


def header(block: bytes, place: int) -> tuple[bytes, int, bytes]:
    """Name, size and type in the header that was read at offset `place`. Raises Damaged."""
    name, size, checksum, kind, _, magic, prefix = HEADER.unpack(block)
    try:
        if int(checksum.strip(b" \0"), 8) != sum(block) - sum(checksum) + 8 * ord(" "):
            raise ValueError
        length = int.from_bytes(size[4:], "big") if size[0] & 0x80 else int(size.strip(b" \0") or b"0", 8)
        if length < 0:  # text such as -7
            raise ValueError
    except ValueError:
        raise Damaged(f"no tar header at offset {place}, where one should be: it is damaged; {AGAIN}") from None
    name, prefix = name.partition(b"\0")[0], prefix.partition(b"\0")[0]
    return prefix + b"/" + name if magic == b"ustar\0" and prefix else name, length, kind


def _within(member: TarMember, end: int) -> TarMember:
    if member.offset + member.size > end:
        raise Damaged(
            f"{member.name[:80]!r} at offset {member.offset} has {member.size} bytes, and the archive ends at {end}: "
            f"it is truncated; {AGAIN}"
        )
    return member


def _extension(file: Bytes, place: int, size: int, end: int, kind: bytes) -> dict[str, Any]:
    """What GNU's long name (L) or pax records (x) say of the next file: its path and size."""
    if size > MAX_EXTENSION or place + size > end:
        raise Damaged(f"a long name of {size} bytes at offset {place}, expected at most {MAX_EXTENSION}; {AGAIN}")
    content = file.read(place, size)
    if kind == b"L":
        return {"path": content.partition(b"\0")[0]}
    fields: dict[str, Any] = {}
    while content:
        length, _, _ = content.partition(b" ")
        record = content[: int(length)] if _number(length) and int(length) <= len(content) else b""
        key, equals, value = record[len(length) + 1 : -1].partition(b"=")
        if not equals or (key == b"size" and not _number(value)):
            raise Damaged(f"damaged pax records at offset {place}; {AGAIN}")
        fields |= {"path": value} if key == b"path" else {"size": int(value)} if key == b"size" else {}
        content = content[len(record) :]
    return fields


def _number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= 18
