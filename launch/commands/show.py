"""`--logs JOB`: the lines of a job's logs, tagged and merged, as they are and, with --follow, as they come.

A line that begins with a time (YYYY-mm-dd HH:MM:SS,mmm) stands among the other processes' lines by it; one without
stands after the line before it in its file. A restart's lines (logs/JOB/restart-N/) come after those of the run before.
Lines pass through byte for byte and in constant memory, whatever the size of the logs. Writes to nothing but the
descriptor it is given, and leaves the job alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import re
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import LaunchError
from launch.commands.log_choice import Source, all_logs, find, selected
from launch.terminal.log_folder import RECORD
from launch.terminal.output import LINE_BYTES, tag
from launch.terminal.record import read_record

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0  # of quiet after the launcher's death: its agents end within 10 s of silence, grace and KILL
STAMP = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?")


class Log:
    """One file, a line at a time: `line` (without its newline) and `key` (its place among all lines) by `advance`."""

    def __init__(self, path: Path, restart: int, number: int, prefix: bytes):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._lines: Iterator[bytes] = iter(())
        self._rest = self._stamp = self.line = b""
        self._restart, self._number = restart, number
        self.prefix = prefix

    @property
    def key(self) -> tuple[int, bytes, int]:
        return self._restart, self._stamp, self._number

    def advance(self, last: bool) -> bool:
        """Go to the next line; False when no whole one is there yet. `last`: what has no newline is a line as well."""
        line = next(self._lines, None)
        while line is None:
            data = os.read(self._descriptor, LINE_BYTES)
            if not data and not (last and self._rest):
                return False
            *lines, self._rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
            if len(self._rest) >= LINE_BYTES:  # in pieces of this size, as the launcher shows it
                lines, self._rest = [*lines, self._rest], b""
            self._lines = iter(lines)
            line = next(self._lines, None)
        self.line = line
        found = STAMP.match(line)
        if found and found[0] > self._stamp:  # a clock that was set back does not move lines
            self._stamp = found[0]
        return True

    def close(self) -> None:
        os.close(self._descriptor)


class Printer:
    """Tagged lines to a descriptor, a write for many lines; BrokenPipeError when nobody reads."""

    def __init__(self, descriptor: int):
        self._descriptor, self._bytes = descriptor, 0
        self._waiting: list[bytes] = []

    def line(self, prefix: bytes, line: bytes) -> None:
        self._waiting += (prefix, line, b"\n")
        self._bytes += len(line)
        if self._bytes >= LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        view = memoryview(b"".join(self._waiting))
        self._waiting, self._bytes = [], 0
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # a terminal that some other program has set so
                select.select([], [self._descriptor], [])


class Reader:
    """All logs of a folder that `wanted` takes, those that appear later too."""

    def __init__(self, folder: Path, wanted: Callable[[Source], bool], coloured: bool):
        self._folder, self._wanted, self._coloured = folder, wanted, coloured
        self._logs: dict[Path, Log] = {}
        self._colours: dict[Source, int] = {}  # a process keeps its colour when it is restarted

    def copy(self, printer: Printer, last: bool) -> bool:
        """Print all that is new, in order; whether there was anything."""
        self._discover()
        heap = [(log.key, log) for log in self._logs.values() if log.advance(last)]
        heapq.heapify(heap)  # keys are all different, so that logs are never compared
        some = bool(heap)
        while heap:
            log = heap[0][1]
            printer.line(log.prefix, log.line)
            if log.advance(last):
                heapq.heapreplace(heap, (log.key, log))
            else:
                heapq.heappop(heap)
        printer.flush()
        return some

    def _discover(self) -> None:
        found = [each for each in all_logs(self._folder) if each[2] not in self._logs and self._wanted(each[1])]
        for restart, source, path in sorted(found, key=lambda each: (each[0], each[1].order)):
            colour = self._colours.setdefault(source, len(self._colours))
            name = f"restart-{restart}/{source}" if restart else str(source)
            prefix = tag(name, colour if self._coloured else None)
            with contextlib.suppress(FileNotFoundError):  # a new run has just put it aside
                self._logs[path] = Log(path, restart, len(self._logs), prefix)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


class Record:
    """What job.json says of the job that was in `folder` at first."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._first = self._read()

    @property
    def sources(self) -> list[Source]:
        return [Source(row["role"], row["rank"]) for row in self._first.get("processes", ())]

    @property
    def ended(self) -> bool:
        """Whether the job has ended; one whose folder another job has taken over has."""
        now = self._read()
        return bool(now.get("ended")) or (bool(self._first) and now.get("mark") != self._first.get("mark"))

    def _read(self) -> dict[str, Any]:
        try:
            return read_record(self._folder / RECORD)
        except FileNotFoundError:
            return {}

    @property
    def abandoned(self) -> bool:
        """Whether no launcher holds the folder any more (see `LogFolder`); False where that cannot be told."""
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)


def show(
    job: str,
    selection: str,
    follow: bool,
    descriptor: int,
    coloured: bool = False,
    root: Path = Path("logs"),
    patience: float = PATIENCE_SECONDS,
) -> str:
    """Print the logs of `job`; with `follow` until it has ended. Why it stopped before that, else "".

    A job whose launcher was killed never ends in its job.json: then this stops after `patience` seconds of quiet.
    """
    folder = find(job, root)
    record = Record(folder)
    there = {source for _, source, _ in all_logs(folder)} | set(record.sources)
    reader, printer = Reader(folder, selected(selection, there), coloured), Printer(descriptor)
    quiet_since = time.monotonic()
    try:
        while True:
            over = not follow or record.ended  # asked first: what was written before the end is read after it
            if reader.copy(printer, over):
                quiet_since = time.monotonic()
            if over:
                return ""
            if time.monotonic() - quiet_since >= patience:
                quiet_since = time.monotonic()
                if record.abandoned and not record.ended:
                    reader.copy(printer, True)
                    return f"the launcher of {folder} is gone without having written the job's end"
            time.sleep(POLL_SECONDS)
    except BrokenPipeError:
        return ""  # as for `--logs JOB | head`
    except OSError as error:
        raise LaunchError(f"cannot show the logs of {folder}: {error.filename or ''} {error.strerror}") from None
    finally:
        reader.close()
