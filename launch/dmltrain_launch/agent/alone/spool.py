"""The frames of an agent that its launcher has not confirmed, on the agent's disk.

Frames are numbered from 1. They are kept in files of SEGMENT_BYTES, each named by the number of its first frame. A file
is removed when the launcher has confirmed all its frames. So the next launcher gets all that the one before has not
confirmed.

When the spool has `most` bytes, further output of a process that has printed its share is left out, and a line in its
place says how many bytes. Events are few and always kept: in memory if the disk is full.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

from dmltrain_launch.agent.alone.segment import Segment
from dmltrain_launch.agent.protocol import EVENT, HEADER, OUTPUT

SEGMENT_BYTES = 1 << 20
MOST_BYTES = 64 << 20
SHARE_BYTES = 1 << 20  # of each process, which is kept however much the others print
LEFT_OUT = "\n%d bytes of output are missing here: %s\n"
NAME = "%020d"


def _output(task: int, data: bytes) -> bytes:
    return HEADER.pack(OUTPUT, task, len(data)) + data


class Spool:
    """Appends to `folder`, which is new and private to this user.

    `first`: the number of the oldest frame that is there; `last`: of the newest. `read` gives each frame once, in
    order, until `rewind`.
    """

    def __init__(self, folder: str, most: int = MOST_BYTES, segment: int = SEGMENT_BYTES, share: int = SHARE_BYTES):
        self.folder, self._most, self._segment, self._share = folder, most, segment, share
        self.first, self.last, self.confirmed = 1, 0, 0
        self._segments: list[Segment] = []
        self._left_out: dict[int, int] = {}  # bytes by task
        self._why = ""
        self._next, self._offset = 1, 0  # first frame of the segment that is read next, and the position in its file
        self.bytes = 0  # in segments that are not completely confirmed

    @property
    def unread(self) -> int:
        """Bytes that `read` has not given yet."""
        size = sum(segment.size for segment in self._segments if segment.first >= self._next)
        return size - self._offset

    @property
    def done(self) -> bool:
        """Whether the launcher has confirmed all frames."""
        return self.confirmed >= self.last

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, kind: int, task: int, payload: bytes) -> None:
        """Keep a frame. If it is output and there is no room, leave it out and count its bytes."""
        if kind == EVENT:
            self._keep(HEADER.pack(kind, task, len(payload)) + payload)
        else:
            self._add_output(task, payload)

    def _add_output(self, task: int, payload: bytes) -> None:
        frame = _output(task, payload)
        shared = self._printed(task) + len(frame) <= self._share
        if self.bytes + len(frame) > self._most and not shared:
            why = f"no launcher was attached, and its host keeps {self._most >> 20} MiB at most"
            return self._leave_out(task, len(payload), why)
        try:
            self._explain(task)
            self._add(frame)
        except OSError as error:
            why = f"its host had no room on its disk ({error.strerror or error})"
            return self._leave_out(task, len(payload), why)
        outputs = self._segments[-1].outputs
        outputs[task] = outputs.get(task, 0) + len(frame)

    def _printed(self, task: int) -> int:
        """Bytes of the output of this process that the spool has."""
        return sum(segment.outputs.get(task, 0) for segment in self._segments)

    def explain_all(self) -> None:
        """Add a line to the output of each process of which some output is missing."""
        for task in list(self._left_out):
            with contextlib.suppress(OSError):
                self._explain(task)

    def _explain(self, task: int) -> None:
        if task in self._left_out:
            self._add(_output(task, (LEFT_OUT % (self._left_out[task], self._why)).encode()))
            del self._left_out[task]

    def _leave_out(self, task: int, size: int, why: str) -> None:
        self._left_out[task] = self._left_out.get(task, 0) + size
        self._why = why

    def _keep(self, frame: bytes) -> None:
        try:
            self._add(frame)
        except OSError:
            self._new()
            self._segments[-1].memory = bytearray()
            self._add(frame)

    def _add(self, frame: bytes) -> None:
        newest = self._segments[-1] if self._segments else None
        if newest is None or newest.size >= self._segment or (newest.memory is not None and newest.count):
            self._new()
        self._segments[-1].append(frame)
        self.bytes += len(frame)
        self.last += 1

    def _new(self) -> None:
        if self._segments and not self._segments[-1].count:
            self._segments.pop()
        self._segments.append(Segment(os.path.join(self.folder, NAME % (self.last + 1)), self.last + 1))

    # -- reading -------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Let `read` begin again with the oldest frame, for the next launcher."""
        self.explain_all()
        self._next, self._offset = self.first, 0

    def read(self, most: int) -> bytes:
        """Whole frames, about `most` bytes, or one frame that is larger; b"" if all have been read."""
        for segment in self._segments:
            if segment.first == self._next:
                data = self._frames(segment, most)
                self._offset += len(data)
                if self._offset == segment.size and segment is not self._segments[-1]:
                    self._next, self._offset = segment.last + 1, 0
                    return data or self.read(most)
                return data
        return b""

    def _frames(self, segment: Segment, most: int) -> bytes:
        data = segment.read(self._offset, max(most, HEADER.size))
        end = 0
        while len(data) - end >= HEADER.size:
            size = HEADER.size + HEADER.unpack_from(data, end)[2]
            if end + size > len(data):
                if not end:
                    return segment.read(self._offset, size)
                break
            end += size
        return data[:end]

    def confirm(self, number: int) -> None:
        """The launcher has kept the frames up to this one."""
        self.confirmed = max(self.confirmed, min(number, self.last))
        while self._segments and self._segments[0].first < self._next and self._segments[0].last <= self.confirmed:
            gone = self._segments.pop(0)
            gone.remove()
            self.bytes -= gone.size
            self.first = gone.last + 1

    def close(self) -> None:
        """At the agent's end: remove the folder if the launcher has confirmed all frames."""
        self.explain_all()
        if self.done:
            shutil.rmtree(self.folder, ignore_errors=True)


class LeftSpool(Spool):
    """The spool that an agent has left in `folder`.

    FileNotFoundError if there is none; PermissionError if another user could have made it.
    """

    def __init__(self, folder: str):
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o77:
            raise PermissionError(f"{folder} is no private folder of this user")
        self.folder, self._most, self._segment = folder, MOST_BYTES, SEGMENT_BYTES
        self._left_out, self._why = {}, ""
        self._segments = [Segment.found(os.path.join(folder, name)) for name in sorted(os.listdir(folder))]
        self.first = self._segments[0].first if self._segments else 1
        self.last = self._segments[-1].last if self._segments else 0
        self.confirmed = self.bytes = 0
        self.rewind()
