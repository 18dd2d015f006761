"""The end of a job as one of its processes, a server or a worker, knows it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from dmltrain.base.errors import JobLost


class JobEnd:
    """`failure`: why the job was lost; set once, else empty. `closing`: this process has finished, or the job has ended
    regularly, so the end of a link is no failure. `over`: the job is lost, or the scheduler has sent its last message.
    `shutdown`: the job has ended regularly. `leaves`: this process no longer looks for another scheduler.
    """

    def __init__(self, process: str, on_end: Callable[[str], None] | None, exit_seconds: float) -> None:
        """`on_end(failure)` is called when the job has ended, so that the owner can wake its waiting threads; with ""
        at its regular end. `exit_seconds`: a `process` of a lost job that does not end by itself for so long is
        ended."""
        self._process, self._on_end, self._exit_seconds = process, on_end, exit_seconds
        self.failure = ""
        self.closing = False
        self.over, self.shutdown, self.leaves = threading.Event(), threading.Event(), threading.Event()
        self._changed = threading.Condition()

    def fail(self, reason: str) -> None:
        """Record that the job is lost, with the first reason, and end this process."""
        with self._changed:
            if self.failure or self.closing:
                return
            self.failure = reason
            self.over.set()
            self.leaves.set()
            self._changed.notify_all()
        threading.Thread(target=self._end_process, name="exit-watchdog", daemon=True).start()
        if self._on_end:
            self._on_end(reason)

    def ended(self) -> None:
        """The job has ended regularly."""
        with self._changed:
            self.over.set()
            self.closing = True
            self.shutdown.set()
        if self._on_end:
            self._on_end("")

    def leave(self) -> None:
        """This process has finished."""
        self.closing = True
        self.leaves.set()

    def news(self) -> None:
        """Something has changed for which a thread may wait."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `reached()` is true; it is asked again after `news`. Raises JobLost."""
        with self._changed:
            if not self._changed.wait_for(lambda: reached() or self.failure, seconds):
                raise JobLost(f"{what} was not reached within {seconds:.0f} s")
            if self.failure:
                raise JobLost(self.failure)

    def lost_within(self, seconds: float, settled: Callable[[], bool] = lambda: False) -> str:
        """Why the job was lost, if that is known within `seconds`; else empty. Waits no longer when this process has
        finished, or `settled()` is true; it is asked again after `news`."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self.closing or settled(), seconds)
            return self.failure

    def _end_process(self) -> None:
        time.sleep(self._exit_seconds)
        if self.closing:
            return
        sys.stderr.write(f"dmltrain: {self._process}: {self.failure}\n")
        sys.stderr.flush()
        os._exit(JobLost.exit_code)
