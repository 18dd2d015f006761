"""A small row of numbers from every worker to every worker, and digests in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore import KVStore

WORDS = 8  # numbers of a sha256


def rows(store: KVStore, name: str, own: Sequence[float]) -> Array:
    """The rows of all workers by rank, float64 (workers, len(own)). Every worker must call this."""
    table = np.zeros((store.num_workers, len(own)))
    table[store.rank] = own
    return store.all_reduce(name, table)


def words(sha256: str) -> list[float]:
    """A digest in hexadecimal as WORDS numbers that a float64 holds exactly."""
    return [float(int(sha256[start : start + 8], 16)) for start in range(0, 8 * WORDS, 8)]


def digest(numbers: Array) -> str:
    """The inverse of `words`."""
    return "".join(f"{int(number):08x}" for number in numbers)


def different(table: Array) -> list[int]:
    """The workers whose row is not worker 0's."""
    return [int(worker) for worker in np.flatnonzero((table != table[0]).any(axis=1))]


def suspects(table: Array, workers: Sequence[int]) -> str:
    """Who is probably wrong, given that `workers` differ from worker 0: worker 0 if all others have the same row."""
    if len(workers) < len(table) - 1 or different(table[1:]):
        return named(workers)
    return "worker 0" if len(workers) > 1 else "worker 0 or worker 1"


def named(workers: Sequence[int]) -> str:
    """'worker 1', 'workers 1, 2 and 5'."""
    *most, last = map(str, workers)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"
