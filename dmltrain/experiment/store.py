"""The folder of results: which cells are done. Its files stay valid after kill -9, a full disk and a power cut.

    lock             locked while a dmltrain-experiment works in the folder
    experiment.json  what the file said, and the cells
    cells/ID/        the log folder of a cell; besides what the launcher writes there:
      cell.json      what the cell is: its settings and its command
      launcher.txt   what the launcher printed
      error.json     why it failed

A cell is done if its job.json has the exit code 0 and its cell.json equals that of the cell now. It has failed if there
is an error.json. Otherwise it is pending: it was never started, or it was interrupted and has to start again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.base import json_text, whole_file
from dmltrain.base.errors import UserError
from dmltrain.base.schema import Invalid
from dmltrain.experiment.plan import difference
from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.result import DONE, ERROR, PENDING, Result
from dmltrain.report.runs import job_record
from dmltrain.report.runs.job_record import JobRecord
from dmltrain.version import __version__

FORMAT = 1
CELLS, RECORD = "cells", "experiment.json"
WRITTEN = (RECORD, "table.md", "table.csv", "table.tex", "results.json", "report.html")
OWN, JOB, FAILED, OUTPUT = "cell.json", "job.json", "error.json", "launcher.txt"
OF_LAUNCHER = ("*.log", "usage.csv", "restart-*", "killed", JOB)  # job.json last: see _set_aside
MOST_BYTES = 8 << 20  # of a file that is read
LOCK_SECONDS = 20.0  # that a launcher may take to end after its experiment was killed


class DiskFull(UserError):
    """The disk of the results is full, or cannot be written."""


@dataclass(frozen=True)
class Store:
    """The folder. Results have the path `folder` as given."""

    folder: Path

    def path(self, cell: Cell) -> Path:
        return self.folder / CELLS / cell.id

    def results(self, experiment: Experiment, cells: Sequence[Cell]) -> list[Result]:
        """The state of each cell."""
        return [self.result(experiment, cell) for cell in cells]

    def result(self, experiment: Experiment, cell: Cell) -> Result:
        path = self.path(cell)
        own, job, failed = _read(path / OWN), job_record.known(str(path)), _read(path / FAILED)
        status, error, seconds = state(identity(experiment, cell), own, job, failed)
        return Result(cell.id, cell.settings, cell.options, status, path, error, seconds, cell.workers, cell.servers)

    def compare(self, experiment: Experiment, cells: Sequence[Cell]) -> None:
        """UserError if the folder has results of an experiment with other cells."""
        if difference := self.difference(experiment, cells):
            raise UserError(
                f"{difference}; --output DIR writes to another folder; --add keeps the cells whose command is the same "
                "and runs the others"
            )

    def difference(self, experiment: Experiment, cells: Sequence[Cell]) -> str:
        """How the experiment differs from the one whose results are in the folder; "" if it does not."""
        before = _read(self.folder / RECORD)
        if "format" not in before and (others := sorted(filter(os.path.lexists, map(self.folder.joinpath, WRITTEN)))):
            raise UserError(
                f"{self.folder} has no results of dmltrain-experiment, and {others[0]} would be replaced: write to "
                "another folder with --output DIR, or remove that file"
            )
        if not before or before.get("digest") == experiment.digest or not self._has_results():
            return ""
        return (
            f"{self.folder} has the results of another experiment, {before.get('name')}: "
            f"{difference.of_records(before, self._record(experiment, cells))}"
        )

    def _has_results(self) -> bool:
        return any((self.folder / CELLS).glob(f"*/{OWN}"))

    def write(self, experiment: Experiment, cells: Sequence[Cell]) -> None:
        """Write experiment.json."""
        with disk(self.folder):
            text = json.dumps(self._record(experiment, cells), indent=1)
            whole_file.write(self.folder / RECORD, (text + "\n").encode())

    def _record(self, experiment: Experiment, cells: Sequence[Cell]) -> dict[str, Any]:
        """The content of experiment.json, as JSON gives it back."""
        now = {
            "format": FORMAT,
            "name": experiment.name,
            "title": experiment.title,
            "digest": experiment.digest,
            "versions": {"dmltrain": __version__, "python": platform.python_version()},
            "experiment": experiment.resolved,
            "cells": [
                {"id": cell.id, "settings": dict(cell.settings), "options": dict(cell.options)} for cell in cells
            ],
        }
        return dict(json.loads(json.dumps(now)))

    def begin(self, experiment: Experiment, cell: Cell) -> None:
        """Prepare the cell's folder: files of an earlier run are moved to previous-N."""
        path = self.path(cell)
        with disk(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / FAILED).unlink(missing_ok=True)
            (path / OUTPUT).unlink(missing_ok=True)
            _set_aside(path)
            whole_file.write(path / OWN, (json.dumps(identity(experiment, cell), indent=1) + "\n").encode())

    def fail(self, cell: Cell, error: str) -> None:
        path = self.path(cell)
        with disk(path):
            path.mkdir(parents=True, exist_ok=True)
            whole_file.write(path / FAILED, (json.dumps({"error": error}) + "\n").encode())


def identity(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """All that decides the cell's results: its command without paths of this machine. In the types that JSON has."""
    facts = {
        "format": FORMAT,
        "settings": dict(cell.settings),
        "program": experiment.program,
        "arguments": list(cell.words),
        "workers": cell.workers,
        "servers": cell.servers,
        "launcher": cell.launcher,
        "hosts": cell.hosts,
        "launcher_arguments": list(experiment.arguments),
    }
    return dict(json.loads(json.dumps(facts)))


def state(
    expected: Mapping[str, Any], own: Mapping[str, Any], job: JobRecord, failed: Mapping[str, Any]
) -> tuple[str, str, float | None]:
    """Status, error and seconds of a cell from its files, which may be empty or have any content. Pure."""
    if own != expected:
        return PENDING, "", None
    if failed:
        error = failed.get("error")
        return ERROR, error if isinstance(error, str) else "its error.json cannot be read", job.seconds
    return (DONE, "", job.seconds) if job.exit_code == 0 else (PENDING, "", None)


def _set_aside(path: Path) -> None:
    """Move the files of an earlier run to previous-N. The launcher would do so as well, but it may fail before that;
    then the old job.json must not count as the result of this run.

    Logs without a job.json are of a launcher that could not write it. They would stop the next launcher, so they are
    removed. job.json is moved last: logs that are left after a kill -9 still count as an earlier run, and are moved.
    """
    if not (path / JOB).exists():
        for log in path.glob("*.log"):
            log.unlink(missing_ok=True)
        return
    previous = next(folder for n in itertools.count(1) if not (folder := path / f"previous-{n}").exists())
    previous.mkdir()
    for name in OF_LAUNCHER:
        for file in sorted(path.glob(name)):
            file.rename(previous / file.name)


def _read(path: Path) -> dict[str, Any]:
    """A file that is a JSON object; {} if it is missing or something else."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError:
        return {}
    return parsed(data)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # without it, opening a named pipe waits for a writer


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; {} if it is something else."""
    try:
        return json_text.parse_object(data, MOST_BYTES)
    except Invalid:
        return {}


# -- the disk and the lock --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turns errors of the file system into DiskFull."""
    try:
        yield
    except OSError as error:
        raise DiskFull(f"{path} cannot be written: {error.strerror or error}{_free(path, error)}") from None


def _free(path: Path, error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f": {free_bytes(path) >> 20} MiB are free there; free some space and start again" if full else ""


def free_bytes(path: Path) -> int:
    """The free bytes of the file system on which `path` is, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder. UserError if another process has it."""
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
            raise UserError(
                f"{folder}: another dmltrain-experiment works there ({holder or 'unknown'}): wait for its end, or "
                "write to another folder with --output DIR"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # this file system has no locks
                raise
        with disk(folder):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def wait_until_free(folder: Path, clock: Callable[[], float], pause: Callable[[float], None]) -> None:
    """Wait until no launcher has the lock of a log folder. After an experiment was killed, its launchers need some time
    to end their jobs."""
    end = clock() + LOCK_SECONDS
    while clock() < end and _held(folder):
        pause(0.1)


def _held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
