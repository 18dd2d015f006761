"""The order that random words give, in the memory of the words alone.

numpy's argsort needs two more arrays of that size; for 14 million samples each has 112 MB. Here the low bits of each
word make room for its number, the words are sorted in place, and the numbers are what is left. Words that differ in the
low bits only, about 90 pairs among 14 million, are then put in order by their own bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dmltrain.base.arrays import Array

PIECE = 1 << 20  # elements that are changed at once


def argsort(words: Array, word: Callable[[int], int]) -> Array:
    """np.argsort(words, kind="stable"), int64, in the memory of `words` (uint64). `word(index)` gives a word again."""
    bits = np.uint64(max(1, (len(words) - 1).bit_length()))
    low = np.uint64((1 << int(bits)) - 1)
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        piece &= ~low
        piece |= np.arange(start, start + len(piece), dtype=np.uint64)
    words.sort()
    equal = _equal(words, bits)
    words &= low
    order = words.view(np.int64)
    for start, stop in _runs(equal):
        order[start:stop] = sorted(order[start:stop].tolist(), key=lambda index: (word(index), index))
    return order


def _equal(words: Array, bits: np.uint64) -> Array:
    """The places of words whose high bits are those of the next word."""
    found = [np.empty(0, np.int64)]
    for start in range(0, len(words) - 1, PIECE):
        high = words[start : start + PIECE + 1] >> bits
        found.append(np.flatnonzero(high[1:] == high[:-1]) + start)
    return np.concatenate(found)


def _runs(equal: Array) -> list[tuple[int, int]]:
    """Start and end of each run of words with the same high bits."""
    breaks = np.flatnonzero(np.diff(equal) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 2) for run in np.split(equal, breaks) if len(run)]
