"""What job.json beside a run's logs says of it. The launcher writes that file; formats 0 and 1 are read.

Another program may have written the file, so every value is checked. A broken one is a note of the report, and the
report goes on without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmltrain.base import json_text, schema
from dmltrain.base.errors import UserError

NAME = "job.json"
_MOST_BYTES = 4 << 20  # a job of 1,000 hosts and 3,000 processes needs 1 MiB
_MOST_LETTERS = 4096  # of one text
_FORMATS = (0, 1)
if TYPE_CHECKING:
    _Words = str
    _Text = str
    _Count = int
    _Log = str
    _Seconds = float
else:
    _Words = schema.text().then(lambda text: text[:_MOST_LETTERS])
    _Text = _Words.only(bool, "a text that is not empty")
    _Count = schema.whole(0, (1 << 31) - 1)
    _Log = schema.text().only(re.compile(r"(restart-\d+/)?[a-z]+-\d+\.log").fullmatch, "a log below the folder")
    _Seconds = schema.number(0, 1e12, "a number of seconds, 0 or more")


@dataclass(frozen=True)
class ProcessRecord:
    """A process of the last attempt. name: `worker-0`. exit_code: as a shell says it; None: unknown, or it runs.
    signal: which ended it, "" if none did. by_launcher: the launcher ended it."""

    name: str
    host: str
    exit_code: int | None
    signal: str
    by_launcher: bool


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt before the last one: when and why it ended."""

    ended: _Text | None = None
    exit_code: _Count | None = None
    cause: _Text | None = None


@dataclass(frozen=True)
class ChangeRecord:
    """The kvstore has changed `after` s from the attempt's start, to `now`. `where`: in the training of all workers,
    such as "after step 147"."""

    after: _Seconds | None = None
    where: _Text = ""
    now: _Text = ""
    by: _Text = ""


@dataclass(frozen=True)
class JobRecord:
    """None: not said. worker_hosts: names of the hosts that run workers. seconds: of the job with start and end. ended:
    None also while it runs. cause_log: that of the process which has failed, below the folder. earlier: the
    attempts that a restart followed. changes: of the last attempt's kvstore."""

    command: tuple[str, ...] = ()
    launcher: str | None = None
    workers: int | None = None
    servers: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    worker_hosts: tuple[str, ...] = ()
    started: str | None = None
    seconds: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    cause_log: str | None = None
    ended: str | None = None
    processes: tuple[ProcessRecord, ...] = ()
    earlier: tuple[AttemptRecord, ...] = ()
    changes: tuple[ChangeRecord, ...] = ()


# -- as the file has it: what is missing or wrong has the default ------------------------------------------------------


@dataclass(frozen=True)
class _Host:
    name: _Text = ""


@dataclass(frozen=True)
class _Process:
    role: _Text = "a process"
    rank: _Count | None = None
    host: _Text = ""
    exit_code: _Count | None = None
    signal: _Text = ""
    ended_by_launcher: bool = False

    def record(self) -> ProcessRecord:
        name = self.role if self.rank is None else f"{self.role}-{self.rank}"
        return ProcessRecord(name, self.host, self.exit_code, self.signal, self.ended_by_launcher)


@dataclass(frozen=True)
class _File:
    command: tuple[_Words, ...] = ()
    launcher: _Text | None = None
    num_workers: _Count | None = None
    num_servers: _Count | None = None
    versions: dict[str, _Text] = field(default_factory=dict)
    hosts: tuple[_Host, ...] = ()
    started: _Text | None = None
    seconds: _Seconds | None = None
    exit_code: _Count | None = None
    cause: _Text | None = None
    cause_log: _Log | None = None
    ended: _Text | None = None
    processes: tuple[_Process, ...] = ()
    restarts: tuple[AttemptRecord, ...] = ()
    kvstore_changes: tuple[ChangeRecord, ...] = ()


def known(folder: str) -> JobRecord:
    """The same as `read`; without a valid record nothing is known."""
    with contextlib.suppress(UserError):
        return read(folder) or JobRecord()
    return JobRecord()


def read(folder: str) -> JobRecord | None:
    """The record of the job whose logs are in `folder`: there, or above it if it is that of a restart. None if there
    is none. UserError, which names the file, if it is not a valid record."""
    folders = [folder, os.path.join(folder, "..")] if re.fullmatch(r"restart-\d+", _last(folder)) else [folder]
    for candidate in folders:
        path = os.path.normpath(os.path.join(candidate, NAME))
        try:
            return parse(path, _content(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(path, error.strerror or error) from None
    return None


def _last(folder: str) -> str:
    return os.path.basename(os.path.abspath(folder))


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe of that name keeps nobody waiting
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _unreadable(path, "it is not a regular file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise _unreadable(path, f"it is larger than {_MOST_BYTES >> 20} MiB")
    return content


def parse(path: str, content: bytes) -> JobRecord:
    """The record in the job.json at `path`. UserError if it is not valid; values of a wrong type count as missing."""
    try:
        fields = json_text.parse_object(content)
    except schema.Invalid as error:
        raise _unreadable(path, error) from None
    version = fields.get("format", 0)
    if type(version) is not int or version not in _FORMATS:
        raise _unreadable(path, f"its format is {schema.shown(version)}, and this program reads formats 0 and 1")
    return _record(schema.salvaged(_File, fields))


def _record(file: _File) -> JobRecord:
    return JobRecord(
        file.command,
        file.launcher,
        file.num_workers,
        file.num_servers,
        {name: version for name, version in file.versions.items() if name},
        hosts=_distinct(host.name for host in file.hosts),
        worker_hosts=_distinct(process.host for process in file.processes if process.role == "worker"),
        started=file.started,
        seconds=file.seconds,
        exit_code=file.exit_code,
        cause=file.cause,
        cause_log=file.cause_log,
        ended=file.ended,
        processes=tuple(process.record() for process in file.processes),
        earlier=file.restarts,
        changes=tuple(change for change in file.kvstore_changes if change.now),
    )


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, names)))


def _unreadable(path: str, why: object) -> UserError:
    return UserError(
        f"{path} is not read: {str(why)[:200]}; expected the record of a job, which the launcher writes there"
    )
