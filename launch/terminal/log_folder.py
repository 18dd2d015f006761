"""The folder of a job's logs: one run's files, never two runs' mixed, and job.json, replaced in one step.

A folder that holds a job.json of ours has its run's files moved to previous-1, previous-2 ... in it; checkpoints and
whatever else lies there stay. A folder with log files but no job.json is somebody else's and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import LaunchError

RECORD, KILLED, LOGS = "job.json", "killed", "logs"
OURS = re.compile(r"(scheduler|server|worker)-\d+\.log|agent-.*\.log|job\.json|restart-\d+|killed")


class LogFolder:
    """Makes and locks `path`; LaunchError when it cannot be ours to write to."""

    def __init__(self, path: str | Path):
        self.shown, self.path = str(path), Path(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._set_aside()
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _lock(self) -> None:
        """Held until this process ends; a filesystem that cannot lock folders goes without."""
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another job is writing its logs here; choose another --log-dir or wait for its end"
            raise LaunchError(message) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL):
                raise

    def _set_aside(self) -> None:
        old = sorted(each for each in self.path.iterdir() if OURS.fullmatch(each.name))
        if not old:
            return
        if not (self.path / RECORD).is_file():
            what = f"{self.path} holds {old[0].name} but no {RECORD}"
            raise LaunchError(f"{what}, so it is no earlier run's folder; choose another --log-dir")
        number = next(n for n in range(1, len(os.listdir(self.path)) + 2) if not (self.path / f"previous-{n}").exists())
        aside = self.path / f"previous-{number}"
        aside.mkdir()
        for each in old:
            each.rename(aside / each.name)

    @property
    def killed(self) -> bool:
        """Whether somebody wants the job to end, wherever its launcher is."""
        return (self.path / KILLED).exists()

    def open_log(self, name: str) -> int:
        """The descriptor of a new, empty log file."""
        path = self.path / f"{name}.log"
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(path, error) from None

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replace job.json in one step."""
        path = self.path / RECORD
        draft = self.path / f".{RECORD}.draft"
        try:
            with open(draft, "w") as file:
                json.dump(record, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"cannot write to {path}: {error.strerror}; choose another --log-dir, or make room there")


def default_path(job: str, exact: bool) -> tuple[str, Path]:
    """The job's name and a folder below logs/ for it; a name that is not `exact` gets -2, -3 ... until it is new."""
    name, number = job, 1
    while not exact and (Path(LOGS) / name).exists():
        number += 1
        name = f"{job}-{number}"
    return name, Path(LOGS) / name


def stamp(seconds: float) -> str:
    """A time of day with its zone, for job.json."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
