"""A run -> its table: one cell per epoch and key, from the values of all workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from dmltrain.report.runs.run import Run

Cell = float | list[float] | None  # None: no value in the log

PERCENT = 100.0
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


def whole_of_accuracies(run: Run) -> float:
    """What this run's accuracies are parts of: 100 if it counts them in percent, else 1."""
    accuracies = [
        number
        for values in run.epochs.values()
        for key, numbers in values.items()
        if "accuracy" in key
        for number in numbers
    ]
    return PERCENT if 1 < largest(accuracies) <= PERCENT else 1.0


AGGREGATES: dict[str, Callable[[Sequence[float]], Cell]] = {"mean": mean, "max": largest, "last": last, "all": list}


@dataclass(frozen=True)
class Table:
    """The table of a run. rows: epoch as printed, ascending -> key -> cell; every row has every key. A row is
    made when it is asked for, because a log can have millions.

    places: epoch as printed -> what the first column says, which is also its place in a plot. axis: heading of that
    column.
    """

    run: Run
    keys: tuple[str, ...]
    rows: Mapping[int, dict[str, Cell]]
    places: Mapping[int, float]
    axis: str = "epoch"

    def counted(self) -> Mapping[float, int]:
        """The epochs by what the first column says."""
        if isinstance(self.places, Shifted) and len(self.places) == len(self.rows):
            return cast("Mapping[float, int]", self.places.inverse())
        return {self.places[epoch]: epoch for epoch in self.rows if epoch in self.places}

    def cells(self, epoch: int, keys: Sequence[str]) -> list[Cell]:
        """Those of an epoch."""
        if isinstance(self.rows, _Rows):
            return self.rows.cells(epoch, keys)
        return [self.rows[epoch].get(key) for key in keys]


class Shifted(Mapping[int, int]):
    """Each of some ascending numbers -> the number and `by`."""

    def __init__(self, numbers: Mapping[int, object], by: int, given: int = 0) -> None:
        self._numbers, self._by, self._given = numbers, by, given

    def inverse(self) -> Shifted:
        """The other way round."""
        return Shifted(self._numbers, -self._by, self._given + self._by)

    def __getitem__(self, number: int) -> int:
        if number - self._given in self._numbers:
            return number + self._by
        raise KeyError(number)

    def __iter__(self) -> Iterator[int]:
        return (number + self._given for number in self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Rows(Mapping[int, dict[str, Cell]]):
    def __init__(
        self, run: Run, keys: Sequence[str], combine: Callable[[Sequence[float]], Cell], missing: Cell
    ) -> None:
        self._epochs, self._keys, self._combine, self._missing = run.epochs, keys, combine, missing

    def cells(self, epoch: int, keys: Sequence[str]) -> list[Cell]:
        values = self._epochs[epoch]
        return [self._combine(values[key]) if key in values else self._missing for key in keys]

    def __getitem__(self, epoch: int) -> dict[str, Cell]:
        return dict(zip(self._keys, self.cells(epoch, self._keys), strict=True))

    def __iter__(self) -> Iterator[int]:
        return iter(self._epochs)

    def __len__(self) -> int:
        return len(self._epochs)


def table(run: Run, aggregate: str = "mean") -> Table:
    """The table of `run`; one of AGGREGATES combines the values of the workers. Its first column has the epoch, counted
    from 1, or the unchanged iteration."""
    others = {key: None for values in run.epochs.values() for key in values if key not in MAIN}
    keys = (*MAIN, *others)
    combine = AGGREGATES[aggregate]
    missing: Cell = [] if aggregate == "all" else None
    shift = 1 - run.first if run.first is not None else 0
    return Table(run, keys, _Rows(run, keys, combine, missing), Shifted(run.epochs, shift))
