"""Threads for a service's arithmetic that last as long as the process.

concurrent.futures accepts no work after the main thread has ended, and it ends before atexit's callbacks run. But a
relay still serves its host while atexit closes its own worker's kvstore.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Pool:
    """So many threads, which take tasks in their order."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True).start()

    def submit(self, task: Callable[[], object]) -> None:
        """Have it called; it raises nothing."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()
