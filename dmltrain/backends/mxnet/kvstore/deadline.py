"""A deadline for ps-lite, which has none: how long a value that was pulled has not come.

A thread waits for one pulled value after another, always the newest (a value that has come says that those before have
come too, or that somebody else will be asked for); another looks at the clock. It costs nothing a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 1.0


class Wait:
    """Calls `overdue(key, seconds)` once, when a value has been awaited for more than `limit` seconds."""

    def __init__(self, limit: float, overdue: Callable[[Any, float], None]) -> None:
        self._limit, self._overdue = limit, overdue
        self._next: queue.Queue[tuple[Any, Any]] = queue.Queue(maxsize=1)
        self._awaited: tuple[Any, float] | None = None  # key, since when
        for work in (self._wait, self._look):
            threading.Thread(target=work, name="awaited values", daemon=True).start()

    def watch(self, key: Any, value: Any) -> None:
        """`value` (NDArray) will hold what was pulled. Ignored while another value is waited for."""
        if self._awaited is None and self._next.empty():
            self._next.put((key, value))

    def _wait(self) -> None:
        while True:
            key, value = self._next.get()
            self._awaited = key, time.monotonic()
            try:
                value.wait_to_read()
            except Exception:  # whoever reads the value gets it too, and knows better what to do
                continue
            finally:
                self._awaited = None

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            awaited = self._awaited
            if awaited and time.monotonic() - awaited[1] > self._limit:
                return self._overdue(awaited[0], time.monotonic() - awaited[1])
