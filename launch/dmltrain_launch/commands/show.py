"""`--logs JOB`: print a job's logs as one stream of tagged lines; with --follow, also print new lines.

Lines that begin with a time (YYYY-mm-dd HH:MM:SS,mmm) are merged by it. A line without a time follows the previous line
of its file. The lines of a restart (logs/JOB/restart-N/) come after those of the attempt before it. What would control
a terminal is printed as its escape sequence in Python, also to a file or pipe: whose logs they are is not known, and
the files have the bytes. Constant memory. Only reads the logs, and does not touch the job.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.text import one_line, safe_output
from dmltrain_launch.commands.log_choice import ORDER, Source, all_logs, find, selected
from dmltrain_launch.terminal.log_folder import JOURNAL, RECORD
from dmltrain_launch.terminal.output import LINE_BYTES, tag, write_all
from dmltrain_launch.terminal.record import read_record

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0  # without new lines after the launcher's death; its agents end after 10 s, grace and KILL
STAMP = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?")


NO_FILE = (errno.ENXIO, errno.ENODEV, errno.ELOOP)  # of a socket, of a device without a driver, of links in a circle


class NoLog(Exception):
    """What has the name of a log cannot be shown; says why."""


class Log:
    """One file, line by line. `advance` sets `line` (without its newline) and `key` (its sort key among all lines)."""

    def __init__(self, path: Path, restart: int, number: int, prefix: bytes):
        self._descriptor = _opened(path)
        self._lines: Iterator[bytes] = iter(())
        self._rest = self._stamp = self.line = b""
        self._restart, self._number = restart, number
        self.prefix = prefix

    @property
    def key(self) -> tuple[int, bytes, int]:
        return self._restart, self._stamp, self._number

    def advance(self, last: bool) -> bool:
        """Read the next line; False if there is no complete one yet. `last`: text without a newline is a line too."""
        line = next(self._lines, None)
        while line is None:
            data = os.read(self._descriptor, LINE_BYTES)
            if not data and not (last and self._rest):
                return False
            *lines, self._rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
            if len(self._rest) >= LINE_BYTES:  # split long lines at this size, as the launcher's display does
                lines, self._rest = [*lines, self._rest], b""
            self._lines = iter(lines)
            line = next(self._lines, None)
        self.line = line
        match = STAMP.match(line)
        if match and match[0] > self._stamp:  # a clock that was set back does not reorder a file's lines
            self._stamp = match[0]
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def _opened(path: Path) -> int:
    """The descriptor of a regular file. A pipe would keep the reader waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise NoLog(str(error.strerror)) from None
    except OSError as error:
        if error.errno in NO_FILE:
            raise NoLog("it is no regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoLog("it is no regular file")
    return descriptor


class Printer:
    """Writes tagged lines to a descriptor, many per write. BrokenPipeError if the reader has closed it."""

    def __init__(self, descriptor: int):
        self._descriptor, self._bytes = descriptor, 0
        self._waiting: list[bytes] = []

    def line(self, prefix: bytes, line: bytes) -> None:
        line = safe_output(line)
        self._waiting += (prefix, line, b"\n")
        self._bytes += len(line)
        if self._bytes >= LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        text = b"".join(self._waiting)
        self._waiting, self._bytes = [], 0
        write_all(self._descriptor, text)


class Reader:
    """All logs of a folder that `wanted` selects, including logs that appear later."""

    def __init__(self, folder: Path, wanted: Callable[[Source], bool], coloured: bool):
        self._folder, self._wanted, self._coloured = folder, wanted, coloured
        self._logs: dict[Path, Log] = {}
        self._left_out: set[Path] = set()
        self._colours: dict[Source, int] = {}  # a process keeps its colour when it is restarted

    def copy(self, printer: Printer, last: bool) -> bool:
        """Print all new lines in order. Returns whether there were any."""
        self._discover(printer)
        heap = [(log.key, log) for log in self._logs.values() if log.advance(last)]
        heapq.heapify(heap)  # keys are unique, so logs are never compared
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

    def _discover(self, printer: Printer) -> None:
        known = {*self._logs, *self._left_out}
        new_logs = [log for log in all_logs(self._folder) if log[2] not in known and self._wanted(log[1])]
        for restart, source, path in sorted(new_logs, key=lambda each: (each[0], each[1].order)):
            colour = self._colours.setdefault(source, len(self._colours))
            name = f"restart-{restart}/{source}" if restart else str(source)
            prefix = tag(one_line(name), colour if self._coloured else None)
            try:
                self._logs[path] = Log(path, restart, len(self._logs), prefix)
            except FileNotFoundError:  # a new job has just moved it to previous-N
                continue
            except NoLog as error:
                self._left_out.add(path)
                printer.line(prefix, f"(left out: {error})".encode())

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


def _launch(record: dict[str, Any]) -> tuple[Any, Any]:
    """What stays the same over a job's restarts, and differs from other jobs. Each attempt has a mark of its own."""
    return record.get("started"), record.get("launched_from")


class Record:
    """The job.json of the job that was in `folder` when this object was made."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._first = self._read()

    @property
    def sources(self) -> list[Source]:
        """The processes that it lists, without rows that are not a process."""
        listed = self._first.get("processes")
        rows = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        pairs = [(row.get("role"), row.get("rank")) for row in rows]
        return [Source(role, rank) for role, rank in pairs if role in ORDER and isinstance(rank, int) and rank >= 0]

    @property
    def ended(self) -> bool:
        """Whether the job has ended. True also if another job now uses its folder."""
        now = self._read()
        return bool(now.get("ended")) or (bool(self._first) and _launch(now) != _launch(self._first))

    def _read(self) -> dict[str, Any]:
        try:
            return read_record(self._folder / RECORD)
        except FileNotFoundError:
            return {}

    @property
    def abandoned(self) -> bool:
        """Whether no launcher locks the folder any more (see `LogFolder`); False if that cannot be determined."""
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
    """Print the logs of `job`; with `follow`, until the job has ended. Returns why it stopped earlier, or "".

    If the launcher was killed, job.json never records the end. Then this stops after `patience` s without new lines.
    """
    folder = find(job, root)
    record = Record(folder)
    sources = {source for _, source, _ in all_logs(folder)} | set(record.sources)
    reader, printer = Reader(folder, selected(selection, sources), coloured), Printer(descriptor)
    quiet_since = time.monotonic()
    try:
        while True:
            over = not follow or record.ended  # checked before reading, so that the last lines are not missed
            if reader.copy(printer, over):
                quiet_since = time.monotonic()
            if over:
                return ""
            if time.monotonic() - quiet_since >= patience:
                quiet_since = time.monotonic()
                if record.abandoned and not record.ended:
                    reader.copy(printer, True)
                    if (folder / JOURNAL).exists():
                        return f"{folder} has no launcher, which writes its logs: dmltrain job attach {job} takes it up"
                    return f"the launcher of {folder} died before it recorded the job's end"
            time.sleep(POLL_SECONDS)
    except BrokenPipeError:
        return ""  # as for `--logs JOB | head`
    except OSError as error:
        raise LaunchError(f"cannot show the logs of {folder}: {error.filename or ''} {error.strerror}") from None
    finally:
        reader.close()
