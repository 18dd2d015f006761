"""Reads a whole file, but only if memory has room for it twice: for its bytes and for the arrays made of them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def most() -> int:
    """Half of the machine's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") // 2


def read(path: Path, limit: int | None = None) -> bytes:
    """The content. Raises OSError, also if it has more than `limit` bytes (default: `most`)."""
    limit, what = (most(), "half of this machine's memory, ") if limit is None else (limit, "")
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > limit:
            reason = f"it has {status.st_size} bytes, the limit is {what}{limit} bytes"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read()
