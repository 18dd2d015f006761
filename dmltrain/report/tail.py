"""A log that grows: only what was appended is read.

A file that became shorter, or another file of its name, is read from its start.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

from dmltrain.report.runs.block import CHUNK, Splitter
from dmltrain.report.runs.head import Head
from dmltrain.report.runs.run import FileValues
from dmltrain.report.workers import Workers


class Tail:
    """The runs in a log so far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._begin(-1)

    def _begin(self, inode: int) -> None:
        self._splitter = Splitter(self.path)
        self._workers = Workers()
        self._head = Head()
        self._offset = 0
        self._inode = inode

    def read(self) -> bool:
        """Read what was appended; returns whether anything was. A file that cannot be read has nothing new."""
        try:
            with open(self.path, "rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin(status.st_ino)
                if status.st_size == self._offset:
                    return False
                stream.seek(self._offset)
                while chunk := stream.read(CHUNK):
                    self._offset += len(chunk)
                    self._feed(chunk)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """The log is complete: its last line counts, also without a line end."""
        for block in self._splitter.end():
            self._head.feed(block)
            self._workers.feed(block)

    def runs(self) -> Sequence[FileValues]:
        """The runs so far, as copies: later calls of `read` do not change them."""
        return copy.deepcopy(self._workers.runs()[0])

    def head(self) -> bytes:
        """The lines that describe the run."""
        return self._head.lines()

    def _feed(self, chunk: bytes) -> None:
        for block in self._splitter.feed(chunk):
            self._head.feed(block)
            self._workers.feed(block)
