"""Ascending whole numbers as ranges, each with its first and its last number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dmltrain.base.arrays import Array

Ranges = tuple[tuple[int, int], ...]


def ranges(numbers: Array) -> Ranges:
    """The ranges of ascending whole numbers, int64 (n,)."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return tuple((int(run[0]), int(run[-1])) for run in runs if len(run))


def numbers(ranges: Iterable[Sequence[int]]) -> Array:
    """The numbers in these ranges, int64 (n,): the inverse of `ranges`."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, last + 1) for first, last in ranges)])
