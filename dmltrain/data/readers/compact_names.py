"""Many short names in little memory: their bytes in one piece, and where each ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.readers.data_file import Damaged

MAX_BYTES = (1 << 32) - 1


class CompactNames:
    """Names by number. content: the bytes of all. ends: uint32 (n,), where each ends."""

    def __init__(self, content: bytes | bytearray, ends: Array) -> None:
        self.content, self.ends = content, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        start = int(self.ends[index - 1]) if index else 0
        return bytes(self.content[start : int(self.ends[index])])


def collect(names: Iterable[bytes], limit: int = MAX_BYTES) -> CompactNames:
    """Raises Damaged for more than `limit` bytes."""
    content, ends = bytearray(), array("I")
    for name in names:
        content += name
        if len(content) > limit:
            raise Damaged(f"the names of its records have more than {limit} bytes; divide it after {len(ends)} records")
        ends.append(len(content))
    return CompactNames(content, np.frombuffer(ends, np.uint32) if ends else np.empty(0, np.uint32))
