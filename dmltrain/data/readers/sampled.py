"""Places at which an index is compared with its data."""

from __future__ import annotations

import numpy as np

COUNT = 64


def places(length: int, count: int = COUNT) -> list[int]:
    """Up to `count` numbers from 0 to length - 1 at equal distances, the first and the last among them."""
    if not length:
        return []
    return sorted({int(place) for place in np.linspace(0, length - 1, min(count, length)).round()})
