"""The output of the processes: byte for byte in <role>-<rank>.log, and as tagged lines on a display.

A display has show(task, lines) for complete lines (bytes, each with its newline), add(name) for one more task before
its first line, and close(). One thread calls a display, and the display may block. Then `Output.write` blocks too,
which slows the processes. But a terminal must not delay a job's end: while the job is ending, lines that do not fit in
memory are only written to the logs.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from dmltrain_launch import LaunchError
from dmltrain_launch.terminal.log_folder import LogFolder, unwritable

LINE_BYTES = 1 << 16  # the display splits longer lines at this size
TAIL_BYTES = 1 << 13  # of each process's output, kept for the report of a failure
WAITING_BYTES = 1 << 20  # queue for a slow display while the job runs
ENDING_BYTES = 1 << 25  # the same while the job ends
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # ANSI foregrounds, readable on dark and light backgrounds


class Display(Protocol):
    def add(self, name: str) -> None: ...

    def show(self, task: int, lines: bytes) -> None: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Receives the output of the processes. After `hurry`, when the job is ending, `write` does not block.

    `add` and `open` say that one more process will print, which gets the next number: with `add` it takes the place of
    the process `task`, with `open` it gets the new log `name`.
    """

    def write(self, task: int, data: bytes) -> None: ...

    def add(self, task: int) -> None: ...

    def open(self, name: str) -> None: ...

    def hurry(self) -> None: ...


class Output:
    """Logs and display of the tasks with `names`. LaunchError if a log cannot be written, at the start or later.

    `write` may be called from several threads, but only from one thread per task.
    """

    def __init__(self, folder: LogFolder, names: Sequence[str], display: Display):
        self._folder, self._names, self._queue = folder, names, DisplayQueue(display, len(names))
        self._files: list[int | None] = []
        try:
            for name in names:
                self._files.append(folder.open_log(name))
        except LaunchError:
            self._close_logs()
            raise
        self._tails = [b""] * len(names)
        # by descriptor: from which position of the log on it may have output that agents send again
        self._again: dict[int, int] = {}
        self._pending = [b""] * len(names)  # the beginning of an incomplete line
        self._shown_as = list(range(len(names)))  # by process: the task of the display under which it is shown

    def _close_logs(self) -> None:
        for descriptor in {file for file in self._files if file is not None}:
            os.close(descriptor)

    def write(self, task: int, data: bytes) -> None:
        """Log and display the output of a process. Blocks while the display blocks, unless the job is ending."""
        self._tails[task] = (self._tails[task] + data)[-TAIL_BYTES:]
        try:
            self._log(task, data)
        finally:
            self._show(task, data)

    def add(self, task: int) -> None:
        """One more process: its lines follow those of `task` in the same log, with the same tag. LaunchError."""
        self._names = [*self._names, self._names[task]]
        self._files.append(self._files[task])
        self._tails.append(b"")
        self._pending.append(b"")
        self._shown_as.append(self._shown_as[task])
        if self._tails[task] and not self._tails[task].endswith(b"\n"):
            self._log(task, b"\n")

    def open(self, name: str) -> None:
        """One more process, with a log and a tag of its own. LaunchError."""
        self._files.append(self._folder.open_log(name))
        self._names = [*self._names, name]
        self._tails.append(b"")
        self._pending.append(b"")
        self._shown_as.append(self._queue.add(name))

    def size(self, task: int) -> int:
        """The bytes in the log of a process."""
        descriptor = self._files[task]
        return 0 if descriptor is None else os.fstat(descriptor).st_size

    def expect_again(self, task: int, size: int) -> None:
        """For a job that another launcher has started: agents may send again what this log has after its first `size`
        bytes. Output that is equal to it is not written twice. Nothing is ever removed from a log. LaunchError.
        """
        descriptor = self._files[task]
        if descriptor is not None:
            try:
                self._again[descriptor] = min(size, self.size(task))
                self._tails[task] = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
            except OSError as error:
                raise unwritable(self._folder.path / f"{self._names[task]}.log", error) from None

    def _already_logged(self, descriptor: int | None, data: bytes) -> int:
        """How many bytes at the beginning of `data` the log has already."""
        if descriptor is None or descriptor not in self._again:
            return 0
        at = self._again[descriptor]
        logged = os.pread(descriptor, len(data), at)
        same = next(
            (index for index, pair in enumerate(zip(logged, data, strict=False)) if pair[0] != pair[1]), len(logged)
        )
        if same == len(data):
            self._again[descriptor] = at + same
        else:
            del self._again[descriptor]
        return same

    def hurry(self) -> None:
        """The job is ending: `write` no longer blocks."""
        self._queue.hurry()

    def _log(self, task: int, data: bytes) -> None:
        descriptor = self._files[task]
        try:
            view = memoryview(data)[self._already_logged(descriptor, data) :]
            while view and descriptor is not None:
                view = view[self._written(descriptor, view) :]
        except OSError as error:
            self._files[task] = None  # report the error once
            raise unwritable(self._folder.path / f"{self._names[task]}.log", error) from None

    def _written(self, descriptor: int, view: memoryview) -> int:
        while True:
            try:
                return os.write(descriptor, view)
            except OSError as error:
                if not self._folder.retry(error):
                    raise

    def _show(self, task: int, data: bytes) -> None:
        lines, newline, rest = (self._pending[task] + data).rpartition(b"\n")
        if len(rest) >= LINE_BYTES:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._pending[task] = rest
        if newline:
            self._queue.put(self._shown_as[task], lines + b"\n")

    def last_lines(self, task: int, count: int = 10) -> list[str]:
        """The last lines of a process. Bytes that are not UTF-8 become replacement characters."""
        return self._tails[task].decode(errors="replace").splitlines()[-count:]

    def close(self, seconds: float | None = None) -> None:
        """Show the remaining lines, for at most `seconds`, and close the display."""
        for task, rest in enumerate(self._pending):
            if rest:
                self._queue.put(self._shown_as[task], rest + b"\n")
        self._queue.close(seconds)


class DisplayQueue:
    """A queue of lines, and the thread that passes them to the display."""

    def __init__(self, display: Display, tasks: int):
        self._display, self._tasks = display, tasks
        self._lines: deque[tuple[int | str, bytes]] = deque()  # of a task; or the name of one more
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

    def add(self, name: str) -> int:
        """One more task. Returns its number on the display."""
        with self._changed:
            self._lines.append((name, b""))
            self._changed.notify_all()
            self._tasks += 1
            return self._tasks - 1

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

    def _show(self, task: int | str, lines: bytes) -> None:
        """Show lines, or add a task. After an error (a closed terminal, an unsupported character), drop the display and
        continue."""
        try:
            if isinstance(task, str):
                self._display.add(task)
            else:
                self._display.show(task, lines)
        except Exception:
            with contextlib.suppress(Exception):
                self._display.close()
            self._display = Silent()


class Silent:
    """The display of --quiet."""

    def add(self, name: str) -> None:
        pass

    def show(self, task: int, lines: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """Writes every line with the tag of its process. A closed pipe or terminal ends the display, not the job."""

    def __init__(self, descriptor: int, names: Sequence[str], coloured: bool):
        self._descriptor, self._gone, self._coloured = descriptor, False, coloured
        self._tags: list[bytes] = []
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self._tags.append(tag(name, len(self._tags) if self._coloured else None))

    def show(self, task: int, lines: bytes) -> None:
        prefix = self._tags[task]
        text = prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        if not self._gone:
            try:
                write_all(self._descriptor, text)
            except OSError:
                self._gone = True

    def close(self) -> None:
        pass


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` whole, to a terminal that another program has made non-blocking, too. OSError if it is gone."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            wait = select.poll()  # select.select refuses descriptors above 1023
            wait.register(descriptor, select.POLLOUT)
            wait.poll()


def tag(name: str, index: int | None) -> bytes:
    """`[worker-0] `; in the colour number `index` if that is given."""
    plain = f"[{name}] ".encode()
    return plain if index is None else b"\x1b[%dm%b\x1b[0m" % (COLOURS[index % len(COLOURS)], plain)
