"""Where the processes' output goes: byte for byte into <role>-<rank>.log, and in tagged lines to a display.

A display is an object with show(task, lines) for whole lines (bytes, each ending with a newline), and close().
Methods of `Output` may be called from several threads, but for one task from one thread only.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Protocol

from launch.log_folder import LogFolder, unwritable

LINE_BYTES = 1 << 16  # longer lines are displayed in pieces of this size
TAIL_BYTES = 1 << 13  # kept of each process for the report of a failure
LOCK_SECONDS = 1.0  # for the last words to a terminal that someone has stopped
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # ANSI foregrounds that show on dark and on light


class Display(Protocol):
    def show(self, task: int, lines: bytes) -> None: ...

    def close(self) -> None: ...


class Output:
    """The logs of tasks with `names`; LaunchError when they cannot be written, at the start or later."""

    def __init__(self, folder: LogFolder, names: Sequence[str], display: Display):
        self._folder, self._names, self._display = folder, names, display
        self._files: list[int | None] = [folder.open_log(name) for name in names]
        self._tails = [b""] * len(names)
        self._pending = [b""] * len(names)  # the beginning of a line whose end has not come yet

    def write(self, task: int, data: bytes) -> None:
        """Take in what a process wrote; blocks as long as the terminal does."""
        self._tails[task] = (self._tails[task] + data)[-TAIL_BYTES:]
        try:
            self._keep(task, data)
        finally:
            self._show(task, data)

    def _keep(self, task: int, data: bytes) -> None:
        descriptor = self._files[task]
        view = memoryview(data)
        try:
            while view and descriptor is not None:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            self._files[task] = None  # said once
            raise unwritable(self._folder.path / f"{self._names[task]}.log", error) from None

    def _show(self, task: int, data: bytes) -> None:
        lines, newline, rest = (self._pending[task] + data).rpartition(b"\n")
        if len(rest) >= LINE_BYTES:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._pending[task] = rest
        if newline:
            self._display.show(task, lines + b"\n")

    def last_lines(self, task: int, count: int = 10) -> list[str]:
        """The last lines of a process, for people: what is not UTF-8 is marked."""
        return self._tails[task].decode(errors="replace").splitlines()[-count:]

    def close(self) -> None:
        for task, rest in enumerate(self._pending):
            if rest:
                self._display.show(task, rest + b"\n")
        self._display.close()


class Silent:
    """The display of --quiet."""

    def show(self, task: int, lines: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """Every line with the tag of its process, as bytes; a reader that went away costs the display, not the job."""

    def __init__(self, descriptor: int, names: Sequence[str], coloured: bool):
        self._descriptor, self._lock, self._gone = descriptor, threading.Lock(), False
        self._tags = [tag(name, index if coloured else None) for index, name in enumerate(names)]

    def show(self, task: int, lines: bytes) -> None:
        prefix = self._tags[task]
        text = memoryview(prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n")
        with self._lock:
            while text and not self._gone:
                try:
                    text = text[os.write(self._descriptor, text) :]
                except BlockingIOError:  # a terminal that some other program has set so
                    select.select([], [self._descriptor], [])
                except OSError:
                    self._gone = True

    def close(self) -> None:
        if self._lock.acquire(timeout=LOCK_SECONDS):
            self._lock.release()


def tag(name: str, index: int | None) -> bytes:
    """`[worker-0] `, in a colour of its own when `index` is given."""
    plain = f"[{name}] ".encode()
    return plain if index is None else b"\x1b[%dm%b\x1b[0m" % (COLOURS[index % len(COLOURS)], plain)
