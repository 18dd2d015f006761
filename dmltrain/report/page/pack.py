"""Numbers -> text in the page: 32-bit floats, least significant byte first, in base64.

A quarter smaller than decimal text, and exact to seven digits. A missing value is NaN, which is a gap in a curve.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterable

LARGEST = 3.4e38  # of a 32-bit float, rounded down


def packed(numbers: Iterable[float | None]) -> str:
    """`numbers` as base64; what is None, infinite or too large is NaN."""
    floats = array("f", (number if number is not None and abs(number) <= LARGEST else math.nan for number in numbers))
    if sys.byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode("ascii")


class Pool:
    """The arrays of a page, each once: two curves over the same epochs share them."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, numbers: Iterable[float | None]) -> int:
        """The index of the array in `arrays`."""
        return self._places.setdefault(packed(numbers), len(self._places))

    @property
    def arrays(self) -> list[str]:
        return list(self._places)
