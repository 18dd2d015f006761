"""Scratch memory of each thread, for arithmetic that goes block by block: allocated once, it stays in the cache."""

from __future__ import annotations

import threading

import numpy as np

from dmltrain.arrays import Array

BLOCK = 65536  # elements, a multiple of every codec's groups; less fits L2 better, but costs more in calls of numpy

_own = threading.local()


def scratch(name: str, size: int, dtype: type = np.float32) -> Array:
    """`size` elements, at most BLOCK, of this thread's array of that name; one name has one dtype everywhere."""
    arrays: dict[str, Array] = _own.__dict__
    if name not in arrays:
        arrays[name] = np.empty(BLOCK, dtype)
    return arrays[name][:size]
