"""SIGTERM to a worker of an elastic job is a notice to leave, such as before a spot machine is taken away."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from logging import Logger
from types import FrameType

REASON = "SIGTERM"


class LeaveNotice:
    """From now on the first SIGTERM calls `leave(reason)`, on a thread of its own. A second one ends the process, and
    so does this class when it still lives `seconds` after the first. Only in the main thread; else nothing changes."""

    def __init__(self, leave: Callable[[str], None], seconds: float, log: Logger) -> None:
        self._leave, self._seconds, self._log = leave, seconds, log
        # SimpleQueue.put may be called by a signal's handler while another put is in progress (it is reentrant in
        # CPython).
        self._given: queue.SimpleQueue[str] = queue.SimpleQueue()
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._wait, name="notice to leave", daemon=True).start()
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._given.put(REASON)

    def _wait(self) -> None:
        reason = self._given.get()
        self._log.info("%s: this worker leaves the job before its next step, within %g s", reason, self._seconds)
        self._leave(reason)
        time.sleep(self._seconds)
        self._log.error("Not left within %g s (DMLTRAIN_LEAVE_SECONDS): this worker ends as a lost one", self._seconds)
        os.kill(os.getpid(), signal.SIGTERM)
