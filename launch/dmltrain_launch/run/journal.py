"""What a launcher of a job with --detach writes down, so that the next launcher can take the job up.

The supervisor is a pure function of its events. So `launcher.journal` has how the job was started, and then each event
with the supervisor's time, written before the event is handled: a launcher that repeats them gets the same supervisor
(docs/decisions/0016). `launcher.kept` has for each process the number of the last frame of output that is in its log,
and the length of the log with it.

Entries are pickled values of this package, so the names of their classes and modules are part of the file. The journal
has the job's key and environment. Only its owner can read it (mode 0600), and it is removed when the job has ended. It
is read only if no other user can have written it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.copy.ownership import is_foreign, others_can_write
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.options import Options
from dmltrain_launch.run.supervisor.event import Event
from dmltrain_launch.terminal.log_folder import JOURNAL, Retry, never_retry

FORMAT = 5  # it rises when a class that is pickled here moves, or gets another name or other fields
KEPT = "launcher.kept"
HEAD = struct.Struct("!II")  # length and CRC-32 of what follows
ROW = struct.Struct("!QQ")  # number of a frame, bytes of the log
MOST_BYTES = 64 << 20  # of one entry
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


@dataclass(frozen=True)
class Beginning:
    """How the job was started. `listed`: see `dmltrain_launch.run.start.Start`. `began`: s since 1970."""

    options: Options
    job: Job
    hosts: tuple[Host, ...]
    listed: tuple[Host, ...]
    path: str
    began: float
    key: str = ""
    certificate: str = ""
    log_folder: str | None = None
    now: float = 0.0


@dataclass(frozen=True)
class Entry:
    """An event at the supervisor's time `now`. `number`: of the agent's frame that brought it, from `host`."""

    now: float
    event: Event
    host: str = ""
    number: int = 0


@dataclass
class JournalContent:
    """All that a journal says. `lease`: the number of the last launcher that has attached to the job."""

    beginning: Beginning
    entries: list[Entry] = field(default_factory=list)
    lease: int = 0


class Journal:
    """Appends to the journal in `folder`. LaunchError if it cannot be written."""

    def __init__(self, folder: Path, dmltrain: str, size: int | None = None, retry: Retry = never_retry):
        """`size`: bytes of an existing journal that are kept; None for a new journal. `dmltrain`: its version.

        `retry(error)`: whether to try a failed write again.
        """
        self._path, self._dmltrain, self._retry = folder / JOURNAL, dmltrain, retry
        self._lock = threading.Lock()
        flags = WRITE | os.O_APPEND | (os.O_EXCL if size is None else os.O_NOFOLLOW)
        try:
            self._descriptor = os.open(self._path, flags, 0o600)
            if size is not None:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def begin(self, beginning: Beginning) -> None:
        line = json.dumps({"format": FORMAT, "dmltrain": self._dmltrain}) + "\n"
        self._write(line.encode() + _encoded(beginning))

    def attach(self, lease: int) -> None:
        """Another launcher has the job."""
        self._write(_encoded(lease))

    def add(self, entry: Entry) -> None:
        """Write an event. Call it before the event is handled."""
        self._write(_encoded(entry))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            with self._lock:
                while view:
                    view = view[self._written(view) :]
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def _written(self, view: memoryview) -> int:
        while True:
            try:
                return os.write(self._descriptor, view)
            except OSError as error:
                if not self._retry(error):
                    raise


def read(folder: Path, dmltrain: str) -> tuple[JournalContent, int]:
    """The journal in `folder`, and its size in bytes without a last entry that was not written completely.

    FileNotFoundError if there is none; LaunchError if it may be another user's, or is of another version.
    """
    path = folder / JOURNAL
    try:
        descriptor = os.open(path, READ)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if is_foreign(status) or others_can_write(status, file.fileno()):
            raise LaunchError(f"{path} may have been written by another user: it is not read")
        _check(path, file.readline(1 << 16), dmltrain)
        content, size = None, file.tell()
        try:
            for entry, end in _entries(file, size):
                size = end
                if isinstance(entry, Beginning):
                    content = JournalContent(entry)
                elif content is None:
                    break
                elif isinstance(entry, Entry):
                    content.entries.append(entry)
                else:
                    content.lease = entry
        except _Strange as error:
            raise LaunchError(f"{path} is not the journal of a launcher: {error}") from None
    if content is None:
        raise LaunchError(f"{path} is not the journal of a launcher, or was not written whole")
    return content, size


def _check(path: Path, line: bytes, dmltrain: str) -> None:
    try:
        head = json.loads(line)
        version, theirs = head["format"], head["dmltrain"]
    except (ValueError, TypeError, KeyError):
        raise LaunchError(f"{path} is not the journal of a launcher") from None
    if theirs != dmltrain:
        raise LaunchError(
            f"{path} was written by dmltrain {ascii(theirs)}, and this is {dmltrain}: attach with that one"
        )
    if version != FORMAT:  # another state of the sources, with the same version
        raise LaunchError(
            f"{path} has format {ascii(version)}, expected {FORMAT}: attach with the dmltrain that wrote it"
        )


def _encoded(entry: object) -> bytes:
    data = pickle.dumps(entry, protocol=4)
    return HEAD.pack(len(data), zlib.crc32(data)) + data


def _entries(file: Any, start: int) -> Iterator[tuple[Any, int]]:
    """Each complete entry, and where it ends in the file. A killed launcher may have written a part of the last one."""
    while len(head := file.read(HEAD.size)) == HEAD.size:
        length, check = HEAD.unpack(head)
        data = file.read(length) if length <= MOST_BYTES else b""
        if len(data) < length or zlib.crc32(data) != check:
            return
        start += HEAD.size + length
        yield _loaded(data), start


def _loaded(data: bytes) -> Any:
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # an unpickler raises nearly anything
        raise _Strange(str(error)) from None


class _Strange(Exception):
    """An entry is not a value of this package."""


class _Reader(pickle.Unpickler):
    """Loads only classes of this package: a pickle can otherwise call any function."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("dmltrain_launch.") and "." not in name:
            named = super().find_class(module, name)
            if isinstance(named, type):
                return named
        raise pickle.UnpicklingError(f"{module}.{name}")


class Kept:
    """`launcher.kept` in `folder`: for each process, by its number, the last frame that is in its log."""

    def __init__(self, folder: Path, retry: Retry = never_retry):
        self._path, self._retry = folder / KEPT, retry
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self._path, error) from None
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        rows = ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size])
        self._rows: dict[int, tuple[int, int]] = {task: (row[0], row[1]) for task, row in enumerate(rows)}

    def frame(self, task: int) -> int:
        return self._rows.get(task, (0, 0))[0]

    def size(self, tasks: Sequence[int]) -> int:
        """The length in bytes of the log that these processes write one after the other."""
        return max((self._rows.get(task, (0, 0))[1] for task in tasks), default=0)

    def put(self, task: int, frame: int, size: int) -> None:
        """`frame` is in the log, which has `size` bytes now."""
        self._rows[task] = frame, size
        while True:
            try:
                os.pwrite(self._descriptor, ROW.pack(frame, size), task * ROW.size)
                return
            except OSError as error:
                if not self._retry(error):
                    raise _unwritable(self._path, error) from None


def remove(folder: Path) -> None:
    """The job has ended: nobody attaches to it any more."""
    for name in (JOURNAL, KEPT):
        with contextlib.suppress(OSError):
            os.unlink(folder / name)


def _unwritable(path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"cannot write to {path}: {error.strerror}; its folder must be writable, with free space", 125)
