"""The numbered frames of one agent, as the launcher of a job with --detach reads them: which are new, and which it has
kept. Pure; its methods are called by the connection's thread (`begin`, `end`) and by the main thread (`wrote`)."""

from __future__ import annotations

import threading

Number = tuple[int, int]  # of an agent's frame, and of the event among those that came with it


class Stream:
    """`seen`: the newest event that was passed on, by the number of its frame and its own in the frame."""

    def __init__(self, seen: Number = (0, 0)):
        self.seen = self.written = seen
        self.last = 0  # of the frames that were there when this launcher attached
        self.number = self._done = 0  # the frame that has come last
        self._waiting = 0
        self._stopped = False
        self._lock = threading.Lock()

    def resume(self, first: int, last: int) -> None:
        """The agent sends its frames again, from the number `first` on; up to `last` they are there already."""
        with self._lock:
            self.number = self._done = first - 1
            self.last = last

    def begin(self) -> int:
        """The number of the frame that has come."""
        self.number += 1
        return self.number

    def is_new(self, number: Number) -> bool:
        """Whether this event was not passed on before; then it is to be, and `wrote` is called for it later."""
        if number <= self.seen:
            return False
        with self._lock:
            self.seen = number
            self._waiting += 1
        return True

    def end(self) -> bool:
        """The frame's output is in the log, and its events are passed on, or counted as waiting. Whether it is the last
        one of those that were there."""
        with self._lock:
            if not self._stopped:
                self._done = self.number
        return self._done == self.last

    def stop(self) -> None:
        """What has come last is not in the log, so neither it nor what follows counts as kept."""
        with self._lock:
            self._stopped = True

    def wrote(self, number: Number) -> None:
        """This event is in the journal."""
        with self._lock:
            self.written = max(self.written, number)
            self._waiting -= 1

    @property
    def kept(self) -> int:
        """The agent need not send the frames up to this one again."""
        with self._lock:
            return self._done if not self._waiting else min(self.written[0] - 1, self._done)
