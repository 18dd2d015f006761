"""A run -> its table: one cell per epoch and key, from the values of all workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dmltrain.report.run import Run

Cell = float | list[float] | None  # None: no value in the log

MAIN = ("train_accuracy", "validation_accuracy", "seconds")  # keys that every row has


def mean(numbers: Sequence[float]) -> float:
    """nan if any number is nan, because a diverged worker must be visible."""
    if len(numbers) == 1:  # most often: a log of one worker
        return numbers[0] + 0.0  # never -0.0
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)  # nan or an infinity
    return total(numbers) / len(numbers)


def total(numbers: Iterable[float]) -> float:
    """The sum, without rounding on the way; infinite if it is too large."""
    numbers = list(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # ValueError: inf - inf
        return sum(numbers)


def largest(numbers: Sequence[float]) -> float:
    """The largest number, ignoring nan; nan if there is no other."""
    return max((number for number in numbers if not math.isnan(number)), default=math.nan)


def last(numbers: Sequence[float]) -> float:
    return numbers[-1]


AGGREGATES: dict[str, Callable[[Sequence[float]], Cell]] = {"mean": mean, "max": largest, "last": last, "all": list}


@dataclass(frozen=True)
class Table:
    """The table of a run. rows: epoch as printed, ascending -> key -> cell; every row has every key.

    places: epoch as printed -> what the first column says, which is also its place in a plot. axis: heading of that
    column.
    """

    run: Run
    keys: tuple[str, ...]
    rows: dict[int, dict[str, Cell]]
    places: dict[int, float]
    axis: str = "epoch"

    def counted(self) -> dict[float, dict[str, Cell]]:
        """The rows by what the first column says."""
        return {self.places[epoch]: row for epoch, row in self.rows.items() if epoch in self.places}


def table(run: Run, aggregate: str = "mean") -> Table:
    """The table of `run`; one of AGGREGATES combines the values of the workers. Its first column has the epoch, counted
    from 1, or the unchanged iteration."""
    others = {key: None for values in run.epochs.values() for key in values if key not in MAIN}
    keys = (*MAIN, *others)
    one = AGGREGATES[aggregate]
    missing: Cell = [] if aggregate == "all" else None
    rows = {
        epoch: {key: one(values[key]) if key in values else missing for key in keys}
        for epoch, values in run.epochs.items()
    }
    shift = 1 - run.first if run.first is not None else 0
    return Table(run, keys, rows, {epoch: epoch + shift for epoch in rows})
