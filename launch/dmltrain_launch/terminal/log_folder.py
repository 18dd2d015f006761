"""The log folder of a job: the logs of one run, and job.json, which is replaced atomically.

If the folder has a job.json of an earlier run, or the queued.json of a job that ended before it had one, that run's
files are moved to previous-1, previous-2, ... inside it; checkpoints and other files stay. A folder with logs but
without these belongs to another program and is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from dmltrain.base import whole_file
from dmltrain_launch import LaunchError
from dmltrain_launch.terminal.record import MODE

RECORD, KILLED, LOGS = "job.json", "killed", "logs"
STAMP = "%Y-%m-%dT%H:%M:%S%z"
JOURNAL = "launcher.journal"  # of a job that lives on without its launcher; removed when the job has ended
QUEUED = "queued.json"  # of a submitted job until it has a job.json; a job that is ended in the queue never has one
OURS = re.compile(
    r"(scheduler|server|worker)-\d+\.log|agent-.*\.log|job\.json|usage\.csv|restart-\d+|killed"
    r"|launcher\.(log|journal|kept)"
)

Retry = Callable[[OSError], bool]  # whether to try a write again that has failed with this error


def never_retry(error: OSError) -> bool:
    return False


class LogFolder:
    """Creates and locks `path`; LaunchError if it is not writable or in use.

    `again`: another launcher has used the folder for the same job, so its files stay. `retry`: for writes that fail.
    """

    retry: Retry = staticmethod(never_retry)
    _descriptor: int | None = None

    def __init__(self, path: str | Path, again: bool = False):
        self.shown, self.path, self._again = str(path), Path(path).absolute(), again
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if not again:
                self._move_previous_run()
        except OSError as error:
            self.unlock()
            raise unwritable(self.path, error) from None
        except LaunchError:
            self.unlock()
            raise

    def unlock(self) -> None:
        """Let another launcher lock it. Without a call this happens when the process exits."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> None:
        """Lock the folder until this process exits, if the file system can lock folders."""
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another job is writing its logs here; wait for its end or use another --log-dir"
            raise LaunchError(message) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL):
                raise

    def _move_previous_run(self) -> None:
        old = sorted(path for path in self.path.iterdir() if OURS.fullmatch(path.name))
        if not old:
            return
        if not any(map(Path.is_file, (self.path / RECORD, self.path / QUEUED))):
            what = f"{self.path} has {old[0].name} but no {RECORD}"
            raise LaunchError(f"{what}, so it is not the log folder of an earlier job; use another --log-dir")
        if (self.path / JOURNAL).exists():
            raise LaunchError(
                f"{self.path} is the log folder of a job that goes on without a launcher (--detach): take it up with "
                f"dmltrain job attach {self.path}, end it with dmltrain job kill {self.path}, or use another --log-dir"
            )
        number = next(n for n in range(1, len(os.listdir(self.path)) + 2) if not (self.path / f"previous-{n}").exists())
        previous = self.path / f"previous-{number}"
        previous.mkdir()
        for each in old:
            each.rename(previous / each.name)

    @property
    def killed(self) -> bool:
        """Whether `dmltrain job kill` has requested the job's end, possibly on another machine."""
        return (self.path / KILLED).exists()

    def open_log(self, name: str) -> int:
        """Create a log file. Returns its descriptor."""
        path = self.path / f"{name}.log"
        while True:
            try:
                return self.create(path.name)
            except OSError as error:
                if not self.retry(error):
                    raise unwritable(path, error) from None

    def create(self, name: str) -> int:
        """Create a file for appending, which may exist with `again`. Returns its descriptor; OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_NOFOLLOW if self._again else os.O_EXCL)
        return os.open(self.path / name, flags, 0o666)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replace job.json atomically."""
        path = self.path / RECORD
        text = json.dumps(record, indent=2) + "\n"
        while True:
            try:
                return whole_file.write(path, text.encode(), MODE)
            except OSError as error:
                if not self.retry(error):
                    raise unwritable(path, error) from None


def is_full(error: OSError) -> bool:
    """Whether the write has failed because the disk, or the user's quota, is full: there may be room later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def unwritable(path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"cannot write to {path}: {error.strerror}; use another --log-dir, or free space there")


def default_path(job: str, exact: bool) -> tuple[str, Path]:
    """The job's name and its folder below logs/. Unless `exact`, the name gets a suffix -2, -3, ... to be unique."""
    name, number = job, 1
    while not exact and (Path(LOGS) / name).exists():
        number += 1
        name = f"{job}-{number}"
    return name, Path(LOGS) / name


def stamp(seconds: float) -> str:
    """Date and time with the zone, for job.json."""
    return time.strftime(STAMP, time.localtime(seconds))


def seconds_of(text: object) -> float | None:
    """The inverse, in seconds since 1970; None for anything else."""
    try:
        return datetime.strptime(str(text), STAMP).timestamp()
    except ValueError:
        return None
