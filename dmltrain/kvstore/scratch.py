"""Scratch memory of each thread for arithmetic block by block. It is allocated once and stays in the cache."""

from __future__ import annotations

import threading

import numpy as np

from dmltrain.base.arrays import Array

BLOCK = 65536  # elements, a multiple of every codec's group; less fits L2 better, but costs more numpy calls

_own = threading.local()


def scratch(name: str, size: int, dtype: type = np.float32) -> Array:
    """The first `size` elements, at most BLOCK, of this thread's array `name`; a name has one dtype everywhere."""
    arrays: dict[str, Array] = _own.__dict__
    if name not in arrays:
        arrays[name] = np.empty(BLOCK, dtype)
    return arrays[name][:size]
