"""A full disk, for a job that lives on without its launcher: what cannot be written is waited for, not given up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dmltrain_launch import NAME
from dmltrain_launch.terminal.log_folder import is_full

LOOK_SECONDS = 1.0


class Room:
    """Call it with the error of a write: True, after a pause, if the write is to be tried again. It waits from `wait`
    on, and no longer after `give_up`. `say` is told of each error that is new."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._said = say, ""
        self._waits = False
        self._given_up = threading.Event()

    def wait(self) -> None:
        self._waits = True

    def give_up(self) -> None:
        self._given_up.set()

    def __call__(self, error: OSError) -> bool:
        if not self._waits or not is_full(error) or self._given_up.is_set():
            return False
        text = str(error.strerror)
        if text != self._said:
            self._said = text
            self._say(
                f"{NAME}: warning: {text} for the log folder: the job goes on, and its output waits for room there"
            )
        return not self._given_up.wait(LOOK_SECONDS)
