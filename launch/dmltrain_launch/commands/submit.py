"""`--submit`: give a job to the queue of a cluster, and return. Its launcher then runs inside of that cluster.

Until that launcher has written job.json, QUEUED in the log folder says where the job is, or that it has ended.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dmltrain.base import whole_file
from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import Held, Inside, Submitted, queue_of
from dmltrain_launch.job.options import Options
from dmltrain_launch.terminal.log_folder import LOGS, QUEUED, RECORD, LogFolder, stamp, unwritable
from dmltrain_launch.terminal.record import MODE, read_own_record


def submit(job: Inside[Options], say: Callable[[str], None]) -> int:
    """Ask the engine, and say what it has answered. LaunchError if it refuses."""
    folder = _folder(job)
    folder.unlock()  # the job may start at once, and its launcher locks the folder
    submitted = _put(job, folder)
    say(f"job {job.name} is {submitted.where}")
    say(f"dmltrain job ps {known_by(job)}, and the same with logs and kill, find it from here")
    return 0


def put(job: Inside[Options]) -> tuple[Submitted, LogFolder]:
    """Give the job to the engine, and write down where it is. The folder stays locked."""
    folder = _folder(job)
    return _put(job, folder), folder


def _folder(job: Inside[Options]) -> LogFolder:
    """The job's log folder, locked; an earlier run's files go to previous-1."""
    path = job.path
    if said := path.is_dir() and _living(path):
        raise LaunchError(f"{path}: {said}, and has this log folder; give another --job or --log-dir")
    return LogFolder(path)


def _put(job: Inside[Options], folder: LogFolder) -> Submitted:
    name = job.options.launcher_name
    submitted = queue_of(name).submit(job)
    _write(folder.path, {"launcher": name, **submitted.found_by, "submitted": stamp(time.time())})
    return submitted


def _living(folder: Path) -> str:
    """What the engine says of the job that this folder is for, if it lives; LaunchError if that cannot be known."""
    try:
        earlier = None if _is_marked(folder) else held(folder)
        return earlier.state()[0] if earlier and earlier.lives else ""
    except LaunchError as error:
        what = f"{folder} is for another job, and whether that lives cannot be asked: {error}"
        raise LaunchError(f"{what}; give another --job or --log-dir, or remove {folder / QUEUED}") from None


def _is_marked(folder: Path) -> bool:
    try:
        return "ended" in read_own_record(folder / QUEUED)
    except FileNotFoundError:
        return False


def mark_ended(folder: Path, code: int) -> None:
    """Note in the log folder that the submitted job has ended."""
    with contextlib.suppress(FileNotFoundError):
        _write(folder, {**read_own_record(folder / QUEUED), "ended": stamp(time.time()), "exit_code": code})


def _write(folder: Path, record: Mapping[str, object]) -> None:
    try:
        whole_file.write(folder / QUEUED, (json.dumps(record) + "\n").encode(), MODE)
    except OSError as error:
        raise unwritable(folder / QUEUED, error) from None


def known_by(job: Inside[Options]) -> str:
    """What `dmltrain job` finds it by, for a shell."""
    return shlex.quote(job.name if job.path == Path(LOGS) / job.name else str(job.path))


def held(folder: Path) -> Held | None:
    """The job with this log folder that was submitted and has no job.json yet."""
    if (folder / RECORD).exists():
        return None
    try:
        record = read_own_record(folder / QUEUED)
    except FileNotFoundError:
        return None
    return queue_of(str(record.get("launcher")), folder / QUEUED).held(record, folder / QUEUED)
