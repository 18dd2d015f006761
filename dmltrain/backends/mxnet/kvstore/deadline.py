"""A deadline for pulls from ps-lite, which has none.

One thread waits for one pulled value after another: whenever it is idle, for the next pull. Another thread watches the
clock. A step costs nothing for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

CHECK_SECONDS = 1.0  # between two checks


class Wait:
    """Calls `overdue(key, seconds)` once, when a value has been awaited for more than `limit` seconds."""

    def __init__(self, limit: float, overdue: Callable[[Any, float], None]) -> None:
        self._limit, self._overdue = limit, overdue
        self._next: queue.Queue[tuple[Any, Any]] = queue.Queue(maxsize=1)
        self._awaited: tuple[Any, float] | None = None  # key, since when
        for work in (self._wait, self._check):
            threading.Thread(target=work, name="awaited values", daemon=True).start()

    def watch(self, key: Any, value: Any) -> None:
        """`value` (NDArray) is the target of a pull. Ignored while another value is awaited."""
        if self._awaited is None and self._next.empty():
            self._next.put((key, value))

    def _wait(self) -> None:
        while True:
            key, value = self._next.get()
            self._awaited = key, time.monotonic()
            try:
                value.wait_to_read()
            except Exception:  # the reader of the value gets the same error, and handles it
                continue
            finally:
                self._awaited = None

    def _check(self) -> None:
        while True:
            time.sleep(CHECK_SECONDS)
            awaited = self._awaited
            if awaited and time.monotonic() - awaited[1] > self._limit:
                return self._overdue(awaited[0], time.monotonic() - awaited[1])
