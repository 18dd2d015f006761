"""The values of the cells of one row -> one value: mean, spread and how often it was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Value = bool | int | float | str | None  # None: unknown
LARGE = 1e150  # the squares of larger numbers are infinite


@dataclass(frozen=True)
class Measured:
    """One value of a row.

    mean: of all cells that have the value; text if it is text or a setting. spread: the sample standard deviation,
    None if the value was measured once or is no measurement. count: how many cells have the value.
    """

    mean: Value = None
    spread: float | None = None
    count: int = 0


NOTHING = Measured()


def measured(values: Sequence[Value], setting: bool = False) -> Measured:
    """`values`: one for each cell. A `setting` is no measurement: it has no spread, and different ones are listed."""
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    numbers = [value for value in known if is_number(value)]
    if setting or len(numbers) < len(known):
        return Measured(_listed(known), None, len(known))
    if len(numbers) == 1:
        return Measured(numbers[0], None, 1)
    return Measured(_mean(numbers), _deviation(numbers), len(numbers))


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(values: Sequence[Value]) -> Value:
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else ", ".join(map(str, distinct))


def _mean(numbers: Sequence[Value]) -> float:
    """nan or infinite if a cell is: a run that diverged must be seen."""
    floats = [float(number or 0) for number in numbers]
    if not all(map(math.isfinite, floats)):
        return sum(floats)
    return (
        math.fsum(number / len(floats) for number in floats)
        if max(map(abs, floats)) > LARGE
        else statistics.fmean(floats)
    )


def _deviation(numbers: Sequence[Value]) -> float:
    floats = [float(number or 0) for number in numbers]
    return statistics.stdev(floats) if all(abs(number) <= LARGE for number in floats) else math.nan
