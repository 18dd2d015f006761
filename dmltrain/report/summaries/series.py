"""The points (x, y) of a run: a value over epochs, iterations or time. Tables, plots and pages use the same points.

epoch       counted from 1; not of logs that count iterations
iteration   steps of the run until the epoch's end: as the log counts them, else epochs times steps of an epoch
time        seconds since the log's first line, from the times of its lines; else the sum of the epochs' seconds
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dmltrain.base.errors import UserError
from dmltrain.report.runs.facts import Facts, facts
from dmltrain.report.runs.run import Run
from dmltrain.report.summaries.measured import ACCURACY, MeasuredRun
from dmltrain.report.table import Table, table

TEST_ERROR = "test_error"  # 1 - validation_accuracy
AXES: Mapping[str, str] = {"epoch": "epoch", "iteration": "iteration", "time": "seconds"}  # name -> heading


def points(
    run: Run, key: str, x: str = "epoch", aggregate: str = "mean", known: Facts | None = None
) -> list[tuple[float, float]]:
    """The values of `key` in ascending epochs, each at its `x` (one of AXES).

    key: of the run's epochs (validation_accuracy, train_loss, seconds, ...) or TEST_ERROR. Accuracies are fractions.
    aggregate: mean, max or last of an epoch's workers. known: the run's facts, if they were read already. Values may be
    nan or infinite. [] if the run has no such value or the log does not say `x`.
    """
    return points_of(MeasuredRun(run, known or facts(run), aggregate), key, x)


def points_of(measured: MeasuredRun, key: str, x: str = "epoch") -> list[tuple[float, float]]:
    """The same of a run whose values were combined already."""
    at = positions(measured, x)
    cells = measured.cells(ACCURACY if key == TEST_ERROR else key)
    return [
        (at[epoch], 1 - cell if key == TEST_ERROR else cell) for epoch, cell in sorted(cells.items()) if epoch in at
    ]


def reached(run: Run, accuracy: float, x: str) -> float | None:
    """The `x` at which the validation accuracy is this high for the first time; None if it never is."""
    return next((at for at, found in points(run, ACCURACY, x) if found >= accuracy), None)


def table_over(run: Run, aggregate: str, x: str) -> Table:
    """The table of `run` with `x` in its first column. UserError if the log does not say `x` of any epoch."""
    combined = "mean" if aggregate == "all" else aggregate
    at = positions(MeasuredRun(run, facts(run), combined), x)
    if run.epochs and not at:
        raise UserError(f"{run.log}: --x {x}: {_EXPECTED[x]}")
    return replace(table(run, aggregate), places=at, axis=AXES[x])


_EXPECTED = {
    "epoch": "the log counts iterations: expected epochs; --x iteration shows it",
    "iteration": "the log does not say how many batches an epoch has: expected the line `Training epochs 0 to 9, 391 "
    "batches each`, or the options num_examples and batch_size",
    "time": "neither have its lines times nor its epochs seconds: expected one of them",
}


def positions(measured: MeasuredRun, x: str) -> dict[int, float]:
    """Epoch as printed -> its place on the axis `x`; without the epochs whose place the log does not say."""
    run = measured.run
    if x == "time":
        return _times(measured) or _sums(measured)
    if run.first is None:
        return {epoch: float(epoch) for epoch in run.epochs} if x == "iteration" else {}
    counted = {epoch: epoch + 1.0 - run.first for epoch in run.epochs}
    if x == "epoch":
        return counted
    steps = steps_of_an_epoch(measured)
    return {epoch: number * steps for epoch, number in counted.items()} if steps else {}


def steps_of_an_epoch(measured: MeasuredRun) -> int | None:
    """As the log says; else from samples, batch and workers. None if these are unknown."""
    known, workers = measured.facts, measured.workers
    batches = known.batches
    if batches is None and known.training_samples and known.batch and workers:
        batches = -(-known.training_samples // (known.batch * workers))
    macrobatch = known.options.get("macrobatch_size")
    if batches and isinstance(macrobatch, int) and known.batch and workers:  # several batches make a step
        batches = -(-batches // max(1, math.ceil(macrobatch / (known.batch * workers))))
    return batches


def _times(measured: MeasuredRun) -> dict[int, float]:
    """The time of each epoch from those of its lines. One without keeps its row: its seconds after the last."""
    known, seconds = measured.run.elapsed, measured.cells("seconds")
    at: dict[int, float] = {}
    passed = 0.0
    for epoch in measured.run.epochs if known else ():
        passed = known.get(epoch, passed + seconds.get(epoch, 0.0))
        at[epoch] = passed
    return at


def _sums(measured: MeasuredRun) -> dict[int, float]:
    """The seconds until the end of each epoch, up to the first epoch whose seconds are unknown."""
    passed, at, seconds = 0.0, {}, measured.cells("seconds")
    for epoch in measured.run.epochs:
        if not math.isfinite(seconds.get(epoch, math.nan)):
            break
        passed += seconds[epoch]
        at[epoch] = passed
    return at
