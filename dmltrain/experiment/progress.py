"""What a run of cells prints: one line for each cell that ends, and on a terminal the running ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from dmltrain.base.safe_text import one_line
from dmltrain.experiment.forecast import from_done, quick
from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.result import DONE, PENDING, Result
from dmltrain.experiment.text import duration

LINE = "\r\x1b[K"  # to the start of the line, which is erased
WIDTH = 160


@dataclass
class ExperimentProgress:
    """`cells` and `results`: all of the experiment. `todo`: those of this run."""

    cells: Sequence[Cell]
    results: dict[str, Result]  # by ID
    todo: Sequence[Cell]
    at_once: int
    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    ended_count: int = 0
    failed: int = 0
    running: dict[str, float] = field(default_factory=dict)  # ID -> when it began

    def started(self, cell: Cell) -> None:
        self.running[cell.id] = self.clock()
        self._show_running()

    def ended(self, cell: Cell, result: Result, seconds: float) -> None:
        self.running.pop(cell.id, None)
        self.results[cell.id] = result
        interrupted = result.status == PENDING
        self.ended_count += not interrupted
        self.failed += result.status not in (DONE, PENDING)
        word = "interrupted" if interrupted else result.status
        text = f"[{self.ended_count}/{len(self.todo)}] {cell.id}: {word} after {duration(seconds)}"
        text += f": {result.error}" if result.error else ""
        left = self.seconds_left()
        text += f"; about {duration(left)} left" if left and not interrupted else ""
        self._print(text)
        self._show_running()

    def seconds_left(self) -> float:
        """Seconds until all cells are done, by those that are; 0 if not known."""
        done = from_done(self.cells, [self.results[cell.id] for cell in self.cells])
        open_ = [cell for cell in self.todo if self.results[cell.id].status == PENDING]
        return sum(quick(cell, done) or 0.0 for cell in open_) / self.at_once

    def _print(self, text: str) -> None:
        print((LINE if self.stream.isatty() else "") + one_line(text), file=self.stream, flush=True)

    def _show_running(self) -> None:
        if self.running and self.stream.isatty():
            text = f"[{self.ended_count}/{len(self.todo)}] running: {', '.join(self.running)}"
            print(f"{LINE}{one_line(text)[:WIDTH]}", end="", file=self.stream, flush=True)
