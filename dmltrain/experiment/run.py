"""Runs cells: starts their launchers, waits until they end, and stores how they ended.

All is in one loop of one thread. A signal ends the running cells, which stay pending. A full disk ends the experiment,
because each further cell would fail as well; the cell that found the disk full stays pending.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dmltrain.experiment import launch
from dmltrain.experiment.command import Where, command, launch_words
from dmltrain.experiment.hosts import Hosts
from dmltrain.experiment.launch import Planned
from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.result import DONE, ERROR, PENDING, Result
from dmltrain.experiment.store import CELLS, DiskFull, Store, free_bytes, wait_until_free

POLL_SECONDS = 0.05
LEAST_FREE = 8 << 20  # bytes: a launcher with less than this has no room for its logs
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RunContext:
    """What all cells share."""

    experiment: Experiment
    store: Store
    program: str
    launcher: str
    where: Where = field(default_factory=Where)
    at_once: int = 1

    def command(self, cell: Cell, words: Sequence[str]) -> list[str]:
        """`words`: the options of the launcher that say what runs where."""
        return command(self.experiment, cell, self.program, self.launcher, self.store.path(cell), words)

    def words(self, cell: Cell) -> tuple[str, ...]:
        return launch_words(self.experiment, cell, self.where)

    def plan(self, words: tuple[str, ...]) -> Planned:
        return launch.plan(self.launcher, words, [self.program])


@dataclass(frozen=True)
class RunReports:
    """Functions that the run calls: started(cell), ended(cell, result, seconds), and between() after cells ended."""

    started: Callable[[Cell], None]
    ended: Callable[[Cell, Result, float], None]
    between: Callable[[], None]


@dataclass
class Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    began: float


class Runner:
    """Runs cells. After `run`, `interrupted` is the signal that ended it, or 0."""

    def __init__(
        self,
        context: RunContext,
        reports: RunReports,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ):
        self.context, self.reports, self.clock, self.pause = context, reports, clock, pause
        self.hosts = Hosts(context.plan)
        self.running: list[Running] = []
        self.interrupted = 0

    def run(self, cells: Sequence[Cell]) -> None:
        """Run all cells, or until a signal. DiskFull names the cell that could not be run."""
        waiting = list(cells)
        with _catching(self._interrupt):
            try:
                while (waiting and not self.interrupted) or self.running:
                    self._start_some(waiting)
                    if not self._end_some():
                        self.pause(POLL_SECONDS)
            except BaseException:
                self._abandon()
                raise

    def _start_some(self, waiting: list[Cell]) -> None:
        for cell in list(waiting):
            if self.interrupted or len(self.running) >= self.context.at_once:
                return
            words = self.hosts.take(cell.id, self.context.words(cell))
            if words is not None:
                waiting.remove(cell)
                self._start(cell, words)

    def _start(self, cell: Cell, words: Sequence[str]) -> None:
        context, folder = self.context, self.context.store.path(cell)
        wait_until_free(folder, self.clock, self.pause)
        self._check_room(cell)
        context.store.begin(context.experiment, cell)
        self.reports.started(cell)
        self.running.append(Running(cell, launch.start(context.command(cell, words), folder), self.clock()))

    def _end_some(self) -> bool:
        """Handle the launchers that have ended. Returns whether there were any."""
        ended = [running for running in self.running if running.process.poll() is not None]
        for running in ended:
            self.running.remove(running)
            self._ended(running.cell, running.process.returncode, self.clock() - running.began)
            self.hosts.give_back(running.cell.id)
        if ended and not self.interrupted:
            self.reports.between()
        return bool(ended)

    def _ended(self, cell: Cell, code: int, seconds: float) -> None:
        context, folder = self.context, self.context.store.path(cell)
        if code < 0:
            launch.end_what_is_left(context.launcher, folder)
        result = context.store.result(context.experiment, cell)
        if result.status != DONE and not self.interrupted:
            self._check_room(cell)
            limit = context.experiment.time_limit
            context.store.fail(cell, launch.reason(code, folder, f"{CELLS}/{cell.id}", limit))
            result = context.store.result(context.experiment, cell)
        self.reports.ended(cell, result, seconds)

    def _check_room(self, cell: Cell) -> None:
        folder = self.context.store.folder
        free = free_bytes(folder)
        if free < LEAST_FREE:
            raise DiskFull(
                f"the disk of {folder} is full: {free >> 10} KiB are free, and cell {cell.id} needs at least "
                f"{LEAST_FREE >> 20} MiB; free some space and start again: it goes on with this cell"
            )

    def _interrupt(self, number: int) -> None:
        self.interrupted = number
        for running in self.running:
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(number)

    def _abandon(self) -> None:
        """End the running cells after an error of this program or of the disk; they stay pending."""
        for running in self.running:
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
        for running in self.running:
            running.process.wait()
        self.running.clear()


@contextlib.contextmanager
def _catching(interrupted: Callable[[int], None]) -> Iterator[None]:
    """Call `interrupted` for the signals that end this program. SIGHUP stays ignored under nohup."""
    numbers = [ending for ending in ENDING if ending != signal.SIGHUP or signal.getsignal(ending) != signal.SIG_IGN]

    def handle(number: int, frame: Any) -> None:
        interrupted(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def to_run(cells: Sequence[Cell], results: Sequence[Result], retry: bool) -> list[Cell]:
    """The cells that are not done; failed ones only with `retry`."""
    wanted = (PENDING, ERROR) if retry else (PENDING,)
    return [cell for cell, result in zip(cells, results, strict=True) if result.status in wanted]
