"""Where the processes' output goes: byte for byte into <role>-<rank>.log, and in tagged lines to a display.

A display is an object with show(task, lines) for whole lines (bytes, each ending with a newline), and close(); one
thread calls it, and it may block as long as it likes. `Output.write` then blocks too, which slows the processes; but
once a job is ending, no terminal may keep it from its end, so what does not fit in memory then is left to the logs.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from launch.terminal.log_folder import LogFolder, unwritable

LINE_BYTES = 1 << 16  # longer lines are displayed in pieces of this size
TAIL_BYTES = 1 << 13  # kept of each process for the report of a failure
WAITING_BYTES = 1 << 20  # kept for a slow display while the job runs
ENDING_BYTES = 1 << 25  # and while it ends
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # ANSI foregrounds that show on dark and on light


class Display(Protocol):
    def show(self, task: int, lines: bytes) -> None: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Takes what the processes print; `hurry`: the job is ending, from now on `write` does not block."""

    def write(self, task: int, data: bytes) -> None: ...

    def hurry(self) -> None: ...


class Output:
    """The logs of tasks with `names`; LaunchError when they cannot be written, at the start or later.

    `write` may be called from several threads, but for one task from one thread only.
    """

    def __init__(self, folder: LogFolder, names: Sequence[str], display: Display):
        self._folder, self._names, self._waiting = folder, names, Waiting(display)
        self._files: list[int | None] = [folder.open_log(name) for name in names]
        self._tails = [b""] * len(names)
        self._pending = [b""] * len(names)  # the beginning of a line whose end has not come yet

    def write(self, task: int, data: bytes) -> None:
        """Take in what a process wrote; while the job is not ending, blocks as long as the display does."""
        self._tails[task] = (self._tails[task] + data)[-TAIL_BYTES:]
        try:
            self._keep(task, data)
        finally:
            self._show(task, data)

    def hurry(self) -> None:
        """The job is ending: from now on `write` does not block."""
        self._waiting.hurry()

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
            self._waiting.put(task, lines + b"\n")

    def last_lines(self, task: int, count: int = 10) -> list[str]:
        """The last lines of a process, for people: what is not UTF-8 is marked."""
        return self._tails[task].decode(errors="replace").splitlines()[-count:]

    def close(self, seconds: float | None = None) -> None:
        """Show what is left, for at most `seconds`, and close the display."""
        for task, rest in enumerate(self._pending):
            if rest:
                self._waiting.put(task, rest + b"\n")
        self._waiting.close(seconds)


class Waiting:
    """Lines on their way to a display, and the thread that takes them there."""

    def __init__(self, display: Display):
        self._display = display
        self._lines: deque[tuple[int, bytes]] = deque()
        self._bytes, self._limit = 0, WAITING_BYTES
        self._ending = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, task: int, lines: bytes) -> None:
        with self._changed:
            while self._bytes > self._limit and not self._ending:
                self._changed.wait()
            if self._bytes <= self._limit:
                self._lines.append((task, lines))
                self._bytes += len(lines)
                self._changed.notify_all()

    def hurry(self) -> None:
        with self._changed:
            self._ending, self._limit = True, ENDING_BYTES
            self._changed.notify_all()

    def close(self, seconds: float | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._closed:
                    self._changed.wait()
                if not self._lines:
                    break
                task, lines = self._lines.popleft()
            self._show(task, lines)
            with self._changed:
                self._bytes -= len(lines)
                self._changed.notify_all()
        self._display.close()

    def _show(self, task: int, lines: bytes) -> None:
        """A display that breaks (a terminal that is gone, or has no such characters) costs itself, never the job."""
        try:
            self._display.show(task, lines)
        except Exception:
            with contextlib.suppress(Exception):
                self._display.close()
            self._display = Silent()


class Silent:
    """The display of --quiet."""

    def show(self, task: int, lines: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """Every line with the tag of its process, as bytes; a reader that went away costs the display, not the job."""

    def __init__(self, descriptor: int, names: Sequence[str], coloured: bool):
        self._descriptor, self._gone = descriptor, False
        self._tags = [tag(name, index if coloured else None) for index, name in enumerate(names)]

    def show(self, task: int, lines: bytes) -> None:
        prefix = self._tags[task]
        text = memoryview(prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n")
        while text and not self._gone:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:  # a terminal that some other program has set so
                select.select([], [self._descriptor], [])
            except OSError:
                self._gone = True

    def close(self) -> None:
        pass


def tag(name: str, index: int | None) -> bytes:
    """`[worker-0] `, in a colour of its own when `index` is given."""
    plain = f"[{name}] ".encode()
    return plain if index is None else b"\x1b[%dm%b\x1b[0m" % (COLOURS[index % len(COLOURS)], plain)
