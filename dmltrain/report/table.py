"""A run -> its table: one cell per epoch and key, from the values of all workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmltrain.report.run import Run

Cell = float | list[float] | None  # None: no value in the log

MAIN = ("train_accuracy", "validation_accuracy", "seconds")  # keys that every row has


def mean(numbers: Sequence[float]) -> float:
    """nan if any number is nan, because a diverged worker must be visible."""
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)  # nan or an infinity
    return math.fsum(numbers) / len(numbers)


def largest(numbers: Sequence[float]) -> float:
    """The largest number, ignoring nan; nan if there is no other."""
    return max((number for number in numbers if not math.isnan(number)), default=math.nan)


def last(numbers: Sequence[float]) -> float:
    return numbers[-1]


AGGREGATES: dict[str, Callable[[Sequence[float]], Cell]] = {"mean": mean, "max": largest, "last": last, "all": list}


@dataclass(frozen=True)
class Table:
    """The table of a run. rows: epoch as printed, ascending -> key -> cell; every row has every key."""

    run: Run
    keys: tuple[str, ...]
    rows: dict[int, dict[str, Cell]]

    def counted(self) -> dict[int, dict[str, Cell]]:
        """The rows by epoch counted from 1, or by unchanged iteration."""
        shift = 1 - self.run.first if self.run.first is not None else 0
        return {epoch + shift: row for epoch, row in self.rows.items()}


def table(run: Run, aggregate: str = "mean") -> Table:
    """The table of `run`; one of AGGREGATES combines the values of the workers."""
    others = {key: None for values in run.epochs.values() for key in values if key not in MAIN}
    keys = (*MAIN, *others)
    one = AGGREGATES[aggregate]
    missing: Cell = [] if aggregate == "all" else None
    rows = {
        epoch: {key: one(values[key]) if key in values else missing for key in keys}
        for epoch, values in run.epochs.items()
    }
    return Table(run, keys, rows)
