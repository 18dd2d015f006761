"""The job whose logs are followed: where the logs of its newest attempt are, its workers, and whether it has ended.

`dmltrain-launch` describes a job in its log folder's job.json and sets `ended` there just before the logs are complete.
It locks the folder until they are complete. So a job that has not ended, and whose folder is not locked, has lost its
launcher. The logs of restart N are in restart-N/.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from dmltrain.report.runs import job_record
from dmltrain.report.runs.job_record import JobRecord

_RESTART = re.compile(r"restart-(\d{1,6})")


class LiveJob:
    """The job that wrote `path`, a log or a folder of logs. Without job.json nothing is known of it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        own = self._path if self._path.is_dir() else self._path.parent
        self._fixed = _RESTART.fullmatch(own.name) is not None  # the logs of this attempt only
        self._folder = own.parent if self._fixed else own
        self._started = self._record().started

    @property
    def attempt(self) -> int:
        """0, or the number of the newest restart that has logs."""
        if self._fixed or not self._described():
            return 0
        matches = [_RESTART.fullmatch(entry.name) for entry in _entries(self._folder)]
        numbers = sorted((int(match[1]) for match in matches if match), reverse=True)
        return next((number for number in numbers if _entries(self._of(number))), 0)

    def logs(self, attempt: int) -> list[Path]:
        """The log files of an attempt so far."""
        if not self._path.is_dir():
            return [self._of(attempt) / self._path.name if attempt else self._path]
        folder = self._of(attempt) if attempt else self._path
        return sorted(entry for entry in _entries(folder) if entry.name.endswith(".log") and entry.is_file())

    @property
    def workers(self) -> int:
        """How many logs have epochs in the end; 0: unknown."""
        return self._record().workers or 0 if self._path.is_dir() else 0

    @property
    def ended(self) -> bool:
        """Whether the job has ended; always False without job.json. Another job may use the folder by now."""
        record = self._record()
        if self._started is None:
            self._started = record.started
        return bool(record.ended) or record.started != self._started

    @property
    def unlocked(self) -> bool:
        """Whether no launcher locks the folder any more; False if that cannot be determined."""
        if not self._described():
            return False
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False  # it is locked, or this file system cannot lock
        finally:
            os.close(folder)
        return True

    def _of(self, attempt: int) -> Path:
        return self._folder / f"restart-{attempt}"

    def _described(self) -> bool:
        return (self._folder / job_record.NAME).exists()

    def _record(self) -> JobRecord:
        return job_record.known(str(self._folder))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
