"""Values -> text. The numbers of a column have the same number of decimals, and a number that was measured once never
looks like a mean: only a mean has a spread and, in parentheses, how often it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dmltrain.experiment.results.measured import Measured, Value, is_number

NOTHING = "-"
DIGITS = 4  # significant ones of a column's largest number
FEW_DIGITS = 2  # at least of its smallest
MOST_DECIMALS = 6
LARGE = 1e9  # from here on, and below 10^-MOST_DECIMALS, with an exponent


def decimals(numbers: Sequence[Value]) -> int:
    """How many decimals show these numbers of one column; 0 if all are whole."""
    sizes = [abs(float(number)) for number in numbers if is_number(number) and _usual(float(number))]  # type: ignore[arg-type]
    if not sizes or all(size == int(size) for size in sizes):
        return 0
    largest, smallest = max(sizes), min(size for size in sizes if size)
    needed = max(DIGITS - 1 - _exponent(largest), FEW_DIGITS - 1 - _exponent(smallest), 0)
    return min(needed, MOST_DECIMALS)


def number(value: Value, places: int) -> str:
    """`value` with that many decimals; text as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if not is_number(value):
        return str(value)
    size = float(value)
    if not math.isfinite(size) or size == 0 or _usual(size):
        return f"{size:.{places}f}" if math.isfinite(size) else f"{size}"
    return f"{size:.{DIGITS}g}"


def text(value: Measured, places: int, cells: int) -> str:
    """`0.812`, `0.812 ± 0.004 (3)`; of three cells with one that failed `0.812 ± 0.004 (2 of 3)`."""
    shown = number(value.mean, places)
    if value.mean is None:
        return shown
    if value.spread is not None:
        shown += f" ± {number(value.spread, places)}"
        return f"{shown} ({value.count})" if value.count == cells else f"{shown} ({value.count} of {cells})"
    return shown if value.count == cells or not is_number(value.mean) else f"{shown} ({value.count} of {cells})"


def exact(value: Value) -> str:
    """For programs: numbers with 12 digits, nothing for an unknown value."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _exponent(size: float) -> int:
    return math.floor(math.log10(size))


def _usual(size: float) -> bool:
    return math.isfinite(size) and 10.0**-MOST_DECIMALS <= abs(size) < LARGE
