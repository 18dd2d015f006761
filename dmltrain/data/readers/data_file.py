"""A file that several threads read at offsets, and what went wrong with it."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path


class Damaged(Exception):
    """Data that are not as their format says: what was found, what was expected and the fix. A reader adds where."""


class DataFile:
    """A regular file, opened for reading; `size` in bytes is that of the time it was opened.

    pread: as os.pread. Raises Damaged if it cannot be opened.
    """

    def __init__(self, path: Path | bytes, pread: Callable[[int, int, int], bytes] = os.pread) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait
            weakref.finalize(self, os.close, self._descriptor)
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
        except OSError as error:
            raise Damaged(f"cannot be opened: {error.strerror or error}") from None
        self.name = os.path.basename(os.fsdecode(path))
        self.size = status.st_size
        self._pread = pread

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes, which must lie within `size`. Raises Damaged."""
        if not 0 <= offset <= offset + count <= self.size:
            raise Damaged(
                f"{count} bytes at offset {offset} are past the end of the file, which has {self.size} bytes: it is "
                "truncated; copy or make it again"
            )
        data = self._read(offset, count)
        while len(data) < count:  # a network file system may return less
            more = self._read(offset + len(data), count - len(data))
            if not more:
                raise Damaged(
                    f"the file had {self.size} bytes when it was opened, and has {os.fstat(self._descriptor).st_size} "
                    "now: something has cut it; restore the file and start again from the last checkpoint"
                )
            data += more
        return data

    def _read(self, offset: int, count: int) -> bytes:
        try:
            return self._pread(self._descriptor, count, offset)
        except OSError as error:
            raise Damaged(
                f"{count} bytes at offset {offset} cannot be read: {error.strerror or error}; if the disk or the "
                "network file system fails (see dmesg), move the data to another one; then start again from the last "
                "checkpoint"
            ) from None
