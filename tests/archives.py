"""Makes the checksums in a mutated zip archive right again, so that a mutation reaches what is behind them."""

from __future__ import annotations

import struct
import zlib

_ENTRY = struct.Struct("<4s12xIII")  # a table's entry: signature, ... checksum, sizes
_NAMES = struct.Struct("<HHH8xI")  # lengths of name, extra field and comment, ... place of the member
_MEMBER = struct.Struct("<4s22xHH")  # a member: signature, ... lengths of name and extra field


def repacked(data: bytes) -> bytes:
    """The archive with the checksum of each stored member that can be found."""
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
