"""Long series -> fewer points. Pure.

A curve keeps its first and last point and, of each interval, the lowest and the highest; a band keeps its extremes too.
Bars, whose parts must add up, become means of consecutive epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dmltrain.report.table import mean

Numbers = Sequence[float | None]


def indices_to_keep(numbers: Numbers, most: int) -> list[int]:
    """The indices of at most `most` of `numbers` (at least 4), ascending."""
    if len(numbers) <= most:
        return list(range(len(numbers)))
    chosen = {0, len(numbers) - 1}
    for start, end in intervals(len(numbers), (most - 2) // 2):
        known = [place for place in range(start, end) if finite(numbers[place])]
        if known:
            chosen.add(min(known, key=lambda place: numbers[place] or 0.0))
            chosen.add(max(known, key=lambda place: numbers[place] or 0.0))
        else:
            chosen.add(start)  # a gap stays a gap
    return sorted(chosen)


def extremes(numbers: Numbers, places: Sequence[int], largest: bool) -> list[float | None]:
    """For each kept place the smallest (or largest) number nearer to it than to another one."""
    choose = max if largest else min
    edges = [0, *((left + right + 1) // 2 for left, right in zip(places, places[1:], strict=False)), len(numbers)]
    indices_to_keep: list[float | None] = []
    for place, (start, end) in zip(places, zip(edges, edges[1:], strict=False), strict=True):
        known = [number for number in numbers[start:end] if number is not None and math.isfinite(number)]
        indices_to_keep.append(choose(known) if known and finite(numbers[place]) else None)
    return indices_to_keep


def means(numbers: Numbers, most: int) -> list[float | None]:
    """At most `most` means of consecutive numbers, of the same count but for the last."""
    indices_to_keep: list[float | None] = []
    for start in range(0, len(numbers), size := group(len(numbers), most)):
        known = [number for number in numbers[start : start + size] if number is not None and math.isfinite(number)]
        indices_to_keep.append(mean(known) if known else None)
    return indices_to_keep


def group(count: int, most: int) -> int:
    """How many consecutive numbers of `count` one of at most `most` means has."""
    return max(1, -(-count // most))


def intervals(count: int, number: int) -> list[tuple[int, int]]:
    """`count` places in `number` intervals of nearly the same length: (start, end)."""
    edges = [count * part // max(1, number) for part in range(max(1, number) + 1)]
    return list(zip(edges, edges[1:], strict=False))


def finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)
