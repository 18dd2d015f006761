"""The table of a live job: `dmltrain-parse --follow LOG`. A row appears when its epoch ends, until the job ends.

In a terminal the table is drawn again in place, with the epoch that is under way; elsewhere each row is one more line,
written when the epoch is complete at all workers. An epoch of a log is complete when the log has a later one, or all
values that the epoch before has. Without job.json beside the logs only Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from dmltrain.base.errors import UserError
from dmltrain.report import missing_metrics
from dmltrain.report.actions import ActionResult
from dmltrain.report.live_job import LiveJob
from dmltrain.report.runs.run import FileValues, Run, merge
from dmltrain.report.table import table
from dmltrain.report.tail import Tail
from dmltrain.report.text import FORMATS

POLL_SECONDS = 0.5
_LAST_SECONDS = 5.0  # for a job that has ended to complete its logs

Write = Callable[[str], list[str]]


@dataclass(frozen=True)
class FollowedJob:
    """A job so far. complete: the epochs, as printed, that all workers have ended. attempt: 0, or that of a restart."""

    run: Run
    complete: frozenset[int] = frozenset()
    attempt: int = 0


class Screen(Protocol):
    """Where the table is shown; both kinds are below and in `live_table`."""

    def show(self, state: FollowedJob) -> None: ...

    def close(self) -> None: ...


@dataclass
class Follower:
    """Reads the logs of a job as they grow."""

    path: str
    job: LiveJob
    _tails: dict[str, Tail] = field(default_factory=dict)
    _attempt: int = 0

    def poll(self, end: bool = False) -> FollowedJob | None:
        """The state, or None if nothing was appended. end: nothing will be appended any more."""
        attempt = self.job.attempt
        if attempt != self._attempt:
            self._attempt = attempt
            self._tails.clear()
        for log in map(str, self.job.logs(attempt)):
            if log not in self._tails:
                self._tails[log] = Tail(log)
        news = [tail.read() for tail in self._tails.values()]
        if end:
            for tail in self._tails.values():
                tail.end()
        return self._state(end) if end or any(news) else None

    def _state(self, end: bool) -> FollowedJob:
        files = [
            (path, values, tail.head())
            for path, tail in self._tails.items()
            if (runs := tail.runs())
            for values in (replace(runs[-1], workers=()), *runs[-1].workers)
        ]
        done = [complete(values) for _, values, _ in files]
        all_there = len(files) >= max(1, self.job.workers)
        run = merge(self.path, [(path, values) for path, values, _ in files], heads=[head for _, _, head in files])
        ended = frozenset(run.epochs) if end else frozenset.intersection(*done) if all_there else frozenset()
        return FollowedJob(run, ended, self._attempt)


def complete(values_of_log: FileValues) -> frozenset[int]:
    """The epochs of a log that have ended there."""
    last = max((*values_of_log.epochs, *values_of_log.snapshots), default=-1)
    epochs = sorted(values_of_log.epochs)
    before = dict(zip(epochs[1:], epochs, strict=False))
    return frozenset(
        epoch
        for epoch, values in values_of_log.epochs.items()
        if epoch < last or (epoch in before and values.keys() >= values_of_log.epochs[before[epoch]].keys())
    )


class PrintedTable:
    """The table as lines, each row once."""

    def __init__(self, given: argparse.Namespace, write: Write, say: Callable[[str, str], None]) -> None:
        self._given, self._write, self._say = given, write, say
        self._written: set[int] = set()
        self._heading = ""
        self._attempt = 0

    def show(self, state: FollowedJob) -> None:
        if state.attempt != self._attempt:
            self._say("note", f"restart {state.attempt} of the job begins; its epochs follow")
            self._attempt = state.attempt
            self._written.clear()
        for epoch in sorted(state.complete - self._written):
            heading, row = self._row(state.run, epoch)
            faults = self._write(row if heading == self._heading else heading + row)
            if faults:
                raise UserError(faults[0])
            self._heading = heading
            self._written.add(epoch)

    def close(self) -> None:
        pass

    def _row(self, run: Run, epoch: int) -> tuple[str, str]:
        """The heading and the line of an epoch."""
        whole = table(run, self._given.aggregate)
        shown = FORMATS[self._given.format]([replace(whole, rows={epoch: whole.rows[epoch]})], self._given.metric_names)
        *heading, row = shown.splitlines(keepends=True)
        return "".join(heading), row


def follow(
    given: argparse.Namespace,
    write: Write,
    say: Callable[[str, str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ActionResult:
    """Follow the job of the one path in `given.logs` until it ends. UserError if the path does not exist."""
    (path,) = given.logs
    if not os.path.exists(path):
        return ActionResult(faults=[f"{path}: cannot be read: No such file or directory"])
    follower = Follower(path, LiveJob(path))
    screen = _screen(given, write, say)
    state: FollowedJob | None = None
    try:
        for state in _states(follower, clock, sleep):
            screen.show(state)
    except UserError as error:
        return ActionResult(faults=[str(error)])
    finally:
        screen.close()
    if state is None or not state.run.epochs:
        return ActionResult(faults=[f"{path}: the job has ended without an epoch"])
    lost = [] if follower.job.ended else [f"{path}: the job has lost its launcher, so its last epochs may be missing"]
    notes = missing_metrics.notes([table(state.run, given.aggregate)], given.metric_names)
    return ActionResult(notes=[*state.run.notes, *notes], faults=lost)


def _states(follower: Follower, clock: Callable[[], float], sleep: Callable[[float], None]) -> Iterator[FollowedJob]:
    """Each new state of a job, until it has ended."""
    last = float("inf")
    while True:
        over = follower.job.unlocked or clock() > last  # before reading: then a job that has ended has written all
        if state := follower.poll(end=over):
            yield state
        if over:
            return
        if follower.job.ended:
            last = min(last, clock() + _LAST_SECONDS)
        sleep(POLL_SECONDS)


def _screen(given: argparse.Namespace, write: Write, say: Callable[[str, str], None]) -> Screen:
    if given.format == "markdown" and bool(getattr(sys.stdout, "isatty", bool)()):
        from dmltrain.report.live_table import LiveTable

        return LiveTable(given)
    return PrintedTable(given, write, say)
