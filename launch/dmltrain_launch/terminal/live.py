"""The live display of a terminal: one row per worker at the bottom; all other lines scroll above."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from dmltrain_launch.terminal.output import tag
from dmltrain_launch.terminal.progress import Progress

REFRESHES_PER_SECOND = 2


class Live:
    """See `dmltrain_launch.terminal.output.Display`."""

    def __init__(self, names: Sequence[str], console: Console | None = None):
        self._names: list[str] = []
        self._workers: dict[int, Progress] = {}
        for name in names:
            self.add(name)
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._screen = Screen(
            console=self._console,
            get_renderable=self._table,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._screen.start()

    def add(self, name: str) -> None:
        if name.startswith("worker-"):
            self._workers = {**self._workers, len(self._names): Progress()}  # another thread draws the table
        self._names.append(name)

    def show(self, task: int, lines: bytes) -> None:
        progress = self._workers.get(task)
        now = time.monotonic()
        others = [line for line in lines[:-1].split(b"\n") if progress is None or not progress.read(line, now)]
        if others:
            prefix = tag(self._names[task], task)
            text = b"\n".join(prefix + line for line in others).decode(errors="replace")
            self._console.print(Text.from_ansi(text))

    def close(self) -> None:
        self._screen.stop()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "epoch", "batch", "samples/s", "accuracy", "time left"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        now = time.monotonic()
        for task, progress in self._workers.items():
            table.add_row(self._names[task], *row(progress, now))
        return table


def row(progress: Progress, now: float) -> tuple[str, ...]:
    """Epoch, batch, speed, accuracy and time left as text; a dash for unknown values."""
    plan = progress.plan
    epoch = _text(progress.epoch, "{}") + (f"/{plan[1]}" if plan and progress.epoch is not None else "")
    batch = _text(progress.batch, "{}") + (f"/{plan[2]}" if plan and progress.batch is not None else "")
    left = progress.seconds_left(now)
    speed, accuracy = _text(progress.speed, "{:.1f}"), _text(progress.accuracy, "{:.4f}")
    return epoch, batch, speed, accuracy, "-" if left is None else duration(left)


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
