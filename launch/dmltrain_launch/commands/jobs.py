"""The table of `dmltrain-job ls`: the jobs whose logs are in a folder, from their job.json. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.commands.processes import printable
from dmltrain_launch.commands.show import Record
from dmltrain_launch.terminal.log_folder import JOURNAL, QUEUED, RECORD, seconds_of
from dmltrain_launch.terminal.record import read_record

COLUMNS = ("JOB", "STATE", "EXIT CODE", "WORKERS", "SERVERS", "HOSTS", "STARTED", "SECONDS")
RIGHT = {"EXIT CODE", "WORKERS", "SERVERS", "HOSTS", "SECONDS"}
MOST_SECONDS = 1e10  # a record may hold any number
RUNNING, ENDED, LOST, UNREADABLE = "running", "ended", "launcher lost", "unreadable"
IN_QUEUE = "in queue"  # it has been submitted, and has not begun
ALONE = "no launcher"  # it was started with --detach, and another launcher can take it up


@dataclass(frozen=True)
class JobRow:
    """A job: the name of its folder, its state, and the content of its job.json."""

    name: str
    state: str
    record: dict[str, Any]


def find_jobs(folder: Path) -> list[JobRow]:
    """The jobs in `folder`, newest first; LaunchError if the folder does not exist."""
    if not folder.is_dir():
        raise LaunchError(f"no folder {folder}: expected the folder that contains the jobs' log folders")
    folders = {path.parent for name in (RECORD, QUEUED) for path in folder.glob(f"*/{name}")}
    return sorted(map(_row, folders), key=lambda row: (str(row.record.get("started", "")), row.name), reverse=True)


def _row(folder: Path) -> JobRow:
    if not (folder / RECORD).exists():
        return _queued(folder)
    try:
        record = read_record(folder / RECORD)
    except (FileNotFoundError, LaunchError):
        return JobRow(folder.name, UNREADABLE, {})
    if record.get("ended"):
        return JobRow(folder.name, ENDED, record)
    if not Record(folder).abandoned:
        return JobRow(folder.name, RUNNING, record)
    return JobRow(folder.name, ALONE if (folder / JOURNAL).exists() else LOST, record)


def _queued(folder: Path) -> JobRow:
    try:
        record = read_record(folder / QUEUED)
    except (FileNotFoundError, LaunchError):
        return JobRow(folder.name, UNREADABLE, {})
    shown = {"started": record.get("submitted"), "exit_code": record.get("exit_code")}
    return JobRow(folder.name, ENDED if "ended" in record else IN_QUEUE, shown)


def table(rows: Sequence[JobRow], now: float) -> list[str]:
    """The lines of the table; `now` in seconds since 1970."""
    cells = [COLUMNS, *(_cells(row, now) for row in rows)]
    wide = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return [_line(row, wide) for row in cells]


def _line(cells: Sequence[str], wide: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if name in RIGHT else cell.ljust(width)
        for name, cell, width in zip(COLUMNS, cells, wide, strict=True)
    ]
    return "  ".join(aligned).rstrip()


def _cells(row: JobRow, now: float) -> tuple[str, ...]:
    record = row.record
    hosts = record.get("hosts")
    return (
        printable(row.name),
        row.state,
        _text(record.get("exit_code")),
        _text(record.get("num_workers")),
        _text(record.get("num_servers")),
        _text(len(hosts) if isinstance(hosts, list) else None),
        _text(record.get("started")),
        _seconds(row, now),
    )


def _text(value: object) -> str:
    return "-" if value is None else printable(str(value))


def _seconds(row: JobRow, now: float) -> str:
    """How long the job took, or has been running."""
    if row.state != RUNNING:
        took = row.record.get("seconds")
        return f"{took:.0f}" if isinstance(took, int | float) and abs(took) < MOST_SECONDS else "-"
    began = seconds_of(row.record.get("started"))
    return "-" if began is None else f"{max(0.0, now - began):.0f}"
