"""`--submit`: give a job to the queue of a cluster, and return. Its launcher then runs inside of that cluster.

Until that one has written job.json, QUEUED in the log folder says where the job is.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from launch import LaunchError, whole_file
from launch.clusters.queue import Held, Inside, Submitted, queue_of
from launch.terminal.log_folder import LOGS, QUEUED, RECORD, LogFolder, stamp, unwritable
from launch.terminal.record import MODE, read_own_record


def submit(job: Inside, say: Callable[[str], None]) -> int:
    """Ask the engine, and say what it has answered. LaunchError if it refuses."""
    submitted, _ = put(job)
    say(f"job {job.name} is {submitted.where}")
    say(f"dmltrain job ps {known_by(job)}, and the same with logs and kill, find it from here")
    return 0


def put(job: Inside) -> tuple[Submitted, LogFolder]:
    """Give the job to the engine, and write down where it is."""
    name, path = job.options.launcher_name, job.path
    if path.is_dir() and (earlier := held(path)) and earlier.lives:
        raise LaunchError(f"{path}: {earlier.state()[0]}, and has this log folder; give another --job or --log-dir")
    folder = LogFolder(path)  # an earlier run's files go to previous-1
    submitted = queue_of(name).submit(job)
    record = {"launcher": name, **submitted.found_by, "submitted": stamp(time.time())}
    try:
        whole_file.write(folder.path / QUEUED, (json.dumps(record) + "\n").encode(), MODE)
    except OSError as error:
        raise unwritable(folder.path / QUEUED, error) from None
    return submitted, folder


def known_by(job: Inside) -> str:
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
