"""TensorBoard's event files, with the writer and the messages of the package `tensorboard` (extra `tensorboard`).

tensorboardX is smaller, but imports PyTorch wherever it is installed: that takes a second and 190 MiB in a process that
trains with MXNet. The package `tensorboard` imports no framework (0.1 s, 8 MiB), and shows the files as well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dmltrain.base.errors import UserError

VERSION = "brain.Event:2"  # of the format


class Library(NamedTuple):
    """What the package `tensorboard` has for writers."""

    Event: Any
    SessionLog: Any
    Summary: Any
    text: Any
    RecordWriter: Any


def library() -> Library:
    """Raises UserError if the package is missing."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise UserError(
            f"--tensorboard needs the package tensorboard, which cannot be imported here ({error}): "
            "pip install 'dmltrain[tensorboard]'"
        ) from None
    return Library(Event, SessionLog, Summary, text_pb, RecordWriter)


class EventFile:
    """A new file of events in `folder`, which TensorBoard shows as one run. OSError if it cannot be written.

    `done`: the steps that the run has made before. TensorBoard ignores what earlier files of the folder have of later
    steps, because this file has these steps again.
    """

    def __init__(self, folder: Path, done: int = 0, clock: Callable[[], float] = time.time):
        self._library, self._clock = library(), clock
        folder.mkdir(parents=True, exist_ok=True)
        now = clock()  # files are read in the order of their names
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb")  # noqa: SIM115  closed by `close`
        self._writer = self._library.RecordWriter(self._file)
        self._add(file_version=VERSION)
        start = self._library.SessionLog(status=self._library.SessionLog.START)
        self._add(session_log=start, step=done + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Tag -> value, at this step."""
        summary = self._library.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._add(summary=summary, step=step)

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        self._add(summary=self._library.text(tag, markdown), step=step)

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._library.Event(wall_time=self._clock(), **fields).SerializeToString())
        self._writer.flush()  # TensorBoard may be watching

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
