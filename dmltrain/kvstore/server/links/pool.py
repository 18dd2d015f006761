"""Threads for a service's arithmetic that run until the process ends.

concurrent.futures accepts no work once the main thread has ended, before atexit's callbacks run. But a relay still
serves its host while an atexit callback closes its own worker's kvstore.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Pool:
    """A number of threads that run tasks in order."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True).start()

    def submit(self, task: Callable[[], object]) -> None:
        """Run `task` on one of the threads. It must not raise."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()
