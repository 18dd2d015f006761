"""Watches the hosts file of a running job for changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.run.supervisor.event import Event, Listed, Unlisted

POLL_SECONDS = 0.5


class HostsWatch:
    """Reports each change of `files` from the time of this call on: what `read` returns, or its LaunchError.

    A file that is being written is read when it has not changed for POLL_SECONDS.
    """

    def __init__(self, files: Sequence[str], read: Callable[[], Sequence[Host]], report: Callable[[Event], None]):
        self._files, self._read, self._report = files, read, report
        self._over = threading.Event()
        self._seen = self._state()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        before = self._seen
        while not self._over.wait(POLL_SECONDS):
            now = self._state()
            if now == before and now != self._seen:
                self._seen = now
                self._report(self._event())
            before = now

    def _event(self) -> Event:
        try:
            return Listed(tuple(self._read()))
        except LaunchError as error:
            return Unlisted(str(error))

    def _state(self) -> list[tuple[int, ...]]:
        """Differs when a file has been changed, replaced or removed."""
        return [_state_of(file) for file in self._files]


def _state_of(file: str) -> tuple[int, ...]:
    try:
        status = os.stat(file)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
