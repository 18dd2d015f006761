"""What job.json beside a run's logs says of it. The launcher writes that file; formats 0 and 1 are read.

Another program may have written the file, so every value is checked. A broken one is a note of the report, and the
report goes on without it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dmltrain.base.errors import UserError

NAME = "job.json"
_MOST_BYTES = 4 << 20  # a job of 1,000 hosts and 3,000 processes needs 1 MiB
_MOST_LETTERS = 4096  # of one text
_FORMATS = (0, 1)


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

    ended: str | None
    exit_code: int | None
    cause: str | None


@dataclass(frozen=True)
class ChangeRecord:
    """The kvstore has changed `after` s from the attempt's start, to `now`. `where`: in the training of all workers,
    such as "after step 147"."""

    after: float | None
    where: str
    now: str
    by: str


@dataclass(frozen=True)
class JobRecord:
    """None: not said. worker_hosts: names of the hosts that run workers. seconds: of the job with start and end. ended:
    None also while it runs. earlier: the attempts that a restart followed. changes: of the last attempt's kvstore."""

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
    ended: str | None = None
    processes: tuple[ProcessRecord, ...] = ()
    earlier: tuple[AttemptRecord, ...] = ()
    changes: tuple[ChangeRecord, ...] = ()


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
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(fields, dict):
        raise _unreadable(path, "it holds no JSON object")
    version = fields.get("format", 0)
    if type(version) is not int or version not in _FORMATS:
        raise _unreadable(path, f"its format is {str(version)[:40]}, and this program reads formats 0 and 1")
    return _checked(fields)


def _checked(fields: dict[str, Any]) -> JobRecord:
    versions = fields.get("versions")
    return JobRecord(
        command=tuple(_texts(fields.get("command"))),
        launcher=_text(fields.get("launcher")),
        workers=_count(fields.get("num_workers")),
        servers=_count(fields.get("num_servers")),
        versions={key: text for key, value in versions.items() if (text := _text(value)) and key}
        if isinstance(versions, dict)
        else {},
        hosts=tuple(dict.fromkeys(_names(fields.get("hosts"), "name"))),
        worker_hosts=tuple(dict.fromkeys(_names(_workers(fields.get("processes")), "host"))),
        started=_text(fields.get("started")),
        seconds=_seconds(fields.get("seconds")),
        exit_code=_count(fields.get("exit_code")),
        cause=_text(fields.get("cause")),
        ended=_text(fields.get("ended")),
        processes=tuple(_process(row) for row in _rows(fields.get("processes"))),
        earlier=tuple(
            AttemptRecord(_text(row.get("ended")), _count(row.get("exit_code")), _text(row.get("cause")))
            for row in _rows(fields.get("restarts"))
        ),
        changes=tuple(
            ChangeRecord(_seconds(row.get("after")), _text(row.get("where")) or "", now, _text(row.get("by")) or "")
            for row in _rows(fields.get("kvstore_changes"))
            if (now := _text(row.get("now")))
        ),
    )


def _process(row: dict[str, Any]) -> ProcessRecord:
    role, rank = _text(row.get("role")) or "a process", _count(row.get("rank"))
    return ProcessRecord(
        role if rank is None else f"{role}-{rank}",
        _text(row.get("host")) or "",
        _count(row.get("exit_code")),
        _text(row.get("signal")) or "",
        row.get("ended_by_launcher") is True,
    )


def _workers(processes: object) -> list[dict[str, Any]]:
    return [row for row in _rows(processes) if row.get("role") == "worker"]


def _rows(value: object) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _names(rows: object, key: str) -> Iterator[str]:
    for row in _rows(rows):
        if name := _text(row.get(key)):
            yield name


def _texts(values: object) -> list[str]:
    return [value[:_MOST_LETTERS] for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _text(value: object) -> str | None:
    return value[:_MOST_LETTERS] if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _seconds(value: object) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e12 else None  # type: ignore[operator, arg-type]


def _unreadable(path: str, why: object) -> UserError:
    return UserError(
        f"{path} is not read: {str(why)[:200]}; expected the record of a job, which the launcher writes there"
    )
