"""usage.csv in the log folder: what each host and the job's processes on it used, one row for each report of an agent.

    time        seconds since 1970 on the launcher's clock, at the end of the interval that the row is about
    host        its name in the job
    cpu         fraction of the host's usable cores that were busy
    memory      fraction of the host's memory in use
    job_cpu     cores that the job's processes kept busy
    job_memory  MiB of the job's processes; memory that several share counts for each
    gpu         mean fraction of the time in which the host's GPUs computed
    gpu_memory  MiB in use on these GPUs

A field is empty where the host does not tell. A job does not end because its disk is full: the file ends then.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import threading
import time
from collections.abc import Callable

from dmltrain_launch.agent.events import Used
from dmltrain_launch.terminal.log_folder import LogFolder
from dmltrain_launch.terminal.output import write_all

FILE = "usage.csv"
DIGITS = {"cpu": 3, "memory": 3, "job_cpu": 3, "job_memory": 1, "gpu": 3, "gpu_memory": 1}  # after the point
HEADER = ("time", "host", *DIGITS)


class UsageFile:
    """Made at the first row. `note` is called once if the file cannot be written. Any thread may call `write`."""

    def __init__(self, folder: LogFolder, note: Callable[[str], None], clock: Callable[[], float] = time.time):
        self._folder, self._note, self._clock = folder, note, clock
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._size = 0  # bytes of whole rows
        self._over = False  # nothing is written any more

    def write(self, used: Used) -> None:
        """Append a row."""
        with self._lock:
            if self._over:
                return
            try:
                if self._descriptor is None:
                    self._descriptor = self._folder.create(FILE)
                    self._size = os.fstat(self._descriptor).st_size  # rows that a launcher before this one has written
                    if not self._size:
                        self._append(",".join(HEADER) + "\n")
                self._append(row(used, self._clock()))
            except OSError as error:
                problem = f"{self._folder.path / FILE} ends here: {error.strerror}; the job goes on"
                self._cut_off()
                self._end()
            else:
                return
        self._note(problem)

    def _append(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        assert self._descriptor is not None
        write_all(self._descriptor, data)
        self._size += len(data)

    def _cut_off(self) -> None:
        """Remove a row that was written in part."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)

    def _end(self) -> None:
        self._over = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        with self._lock:
            self._end()


def row(used: Used, now: float) -> str:
    """A line of the file. `now`: seconds since 1970."""
    values = (getattr(used, name) for name in DIGITS)
    shown = [
        "" if value is None else f"{value:.{digits}f}" for value, digits in zip(values, DIGITS.values(), strict=True)
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([f"{now:.3f}", used.host, *shown])
    return text.getvalue()
