"""The numbered frames of one agent, in a job with --detach: which are new to the launcher, and which it has kept.

Pure. The connection's thread calls `begin` and `end` for each frame. The main thread calls `wrote` for each event.
"""

from __future__ import annotations

import threading


class Stream:
    """`seen`: the number of the frame of the newest event that was passed on."""

    def __init__(self, seen: int = 0):
        self.seen = self.written = seen
        self.last = 0  # the last frame that the agent had when this launcher attached
        self.number = self._done = 0  # the frame that has come last, and the last one that is handled
        self._waiting = 0  # events that were passed on and are not in the journal yet
        self._stopped = False
        self._lock = threading.Lock()

    def resume(self, first: int, last: int) -> None:
        """The agent sends its frames again, from the number `first` on. It has those up to `last` already."""
        with self._lock:
            self.number = self._done = first - 1
            self.last = last

    def begin(self) -> int:
        """A frame has come. Returns its number."""
        self.number += 1
        return self.number

    def is_new(self, number: int) -> bool:
        """Whether the event of this frame was not passed on before. If so, pass it on; call `wrote` when it is in the
        journal."""
        if number <= self.seen:
            return False
        with self._lock:
            self.seen = number
            self._waiting += 1
        return True

    def end(self) -> bool:
        """The frame is handled: its output is in the log, and its events are passed on.

        Returns whether it is the last frame that the agent had when this launcher attached.
        """
        with self._lock:
            if not self._stopped:
                self._done = self.number
        return self._done == self.last

    def stop(self) -> None:
        """The last output could not be written to the log. Neither its frame nor a later one counts as kept."""
        with self._lock:
            self._stopped = True

    def wrote(self, number: int) -> None:
        """The event of this frame is in the journal."""
        with self._lock:
            self.written = max(self.written, number)
            self._waiting -= 1

    @property
    def kept(self) -> int:
        """The last frame that the agent need not send again: all events and output up to it are kept."""
        with self._lock:
            return self._done if not self._waiting else min(self.written, self._done)
