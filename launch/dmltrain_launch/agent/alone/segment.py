"""One file of a spool."""

from __future__ import annotations

import contextlib
import os

from dmltrain_launch.agent.protocol import EVENT, HEADER, NO_TASK, OUTPUT


class Segment:
    """Frames from number `first` on, `size` bytes in the file `path`; or, if there is no room on the disk, in
    `memory`."""

    def __init__(self, path: str, first: int):
        self.path, self.first, self.count, self.size = path, first, 0, 0
        self.outputs: dict[int, int] = {}  # bytes by task
        self.memory: bytearray | None = None

    @classmethod
    def found(cls, path: str) -> Segment:
        """One that an agent has left: whole frames in the file, which is named by the number of the first one."""
        segment = cls(path, int(os.path.basename(path)))
        segment.size, segment.count = _measured(path)
        return segment

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def append(self, frame: bytes) -> None:
        """OSError if there is no room; then nothing has changed."""
        if self.memory is not None:
            self.memory += frame
        else:
            self._write(frame)
        self.size += len(frame)
        self.count += 1

    def _write(self, frame: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.pwrite(descriptor, frame, self.size) < len(frame):
                raise OSError("there is no room")
        finally:
            os.close(descriptor)

    def read(self, start: int, most: int) -> bytes:
        if self.memory is not None:
            return bytes(self.memory[start : start + most])
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, min(most, self.size - start), start)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        if self.memory is None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _measured(path: str) -> tuple[int, int]:
    """Bytes and number of the whole frames in a file: a killed agent may have written a part of one."""
    size, end, count = os.path.getsize(path), 0, 0
    with open(path, "rb") as file:
        while end + HEADER.size <= size:
            file.seek(end)
            kind, task, length = HEADER.unpack(file.read(HEADER.size))
            known = (kind == EVENT and task == NO_TASK) or kind == OUTPUT
            if not known or end + HEADER.size + length > size:
                break
            end += HEADER.size + length
            count += 1
    return end, count
