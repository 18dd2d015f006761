"""Progress of a long command on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from dmltrain.base.safe_text import raw

EVERY_SECONDS = 10.0


@contextmanager
def progress(verb: str, total: int, done: int = 0, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of images that are done. `done`: how many an earlier run has done."""
    stream = raw(sys.stderr if stream is None else stream)  # the bar moves the cursor
    if stream.isatty():
        with _bar(verb, total, done, stream) as advance:
            yield advance
    else:
        lines = ProgressLines(verb, total, done, stream)
        yield lines
        lines.end()


@contextmanager
def _bar(verb: str, total: int, done: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(verb, total=total, completed=done)
        yield lambda count: bar.update(task, completed=count)


class ProgressLines:
    """pack: 12000 of 1281167 images, 1200 images/s, 17 min left"""

    def __init__(
        self, verb: str, total: int, done: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._verb, self._total, self._first, self._stream, self._clock = verb, total, done, stream, clock
        self._started = self._last = clock()
        self._done = done

    def __call__(self, done: int) -> None:
        self._done = done
        if self._clock() - self._last >= EVERY_SECONDS:
            self._last = self._clock()
            self._write(f", {duration((self._total - done) / max(self._speed(), 1e-9))} left")

    def end(self) -> None:
        self._write("")

    def _speed(self) -> float:
        """Images per second of this run."""
        return (self._done - self._first) / max(self._clock() - self._started, 1e-9)

    def _write(self, rest: str) -> None:
        speed = f"{self._speed():.0f} images/s"
        print(f"{self._verb}: {self._done} of {self._total} images, {speed}{rest}", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
