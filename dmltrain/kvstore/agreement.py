"""A small row of numbers from every worker to every worker, digests in it, and all workers' bytes on worker 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import KVStore

WORDS = 8  # numbers of a sha256


def rows(store: KVStore, name: str, own: Sequence[float]) -> Array:
    """The rows of all workers by rank, float64 (workers, len(own)). Every worker must call this. A worker that is alone
    gets its own row for every rank; the scheduler compares what must be the same when the worker joins."""
    if store.is_alone:
        return np.tile(np.array(own, np.float64), (store.num_workers, 1))
    table = np.zeros((store.num_workers, len(own)))
    table[store.rank] = own
    return store.all_reduce(name, table)


def gathered(store: KVStore, own: bytes) -> list[bytes]:
    """On worker 0 the bytes of all workers by rank; [] on the others. They are sent one worker after the other. Every
    worker must call this."""
    sizes = rows(store, "bytes of each worker", [len(own)])[:, 0]
    contents = [own]
    for rank in range(1, store.num_workers):
        values = np.frombuffer(own, np.uint8) if rank == store.rank else np.zeros(int(sizes[rank]), np.uint8)
        store.broadcast(values, needed=store.rank == 0, source=rank)
        contents += [values.tobytes()] if store.rank == 0 else []
    return contents if store.rank == 0 else []


def words(sha256: str) -> list[float]:
    """A digest in hexadecimal as WORDS numbers that a float64 holds exactly."""
    return [float(int(sha256[start : start + 8], 16)) for start in range(0, 8 * WORDS, 8)]


def digest(numbers: Array) -> str:
    """The inverse of `words`."""
    return "".join(f"{int(number):08x}" for number in numbers)


def different(table: Array) -> list[int]:
    """The workers whose row is not worker 0's."""
    return [int(worker) for worker in np.flatnonzero((table != table[0]).any(axis=1))]


def suspects(table: Array, rows: Sequence[int], workers: Sequence[int] | None = None) -> str:
    """The workers that are probably wrong, as text. `rows`: those that differ from the first row, worker 0's. If all
    other rows are equal, worker 0 is probably wrong. `workers`: the worker of each row (default: by rank)."""
    workers = range(len(table)) if workers is None else workers
    if len(rows) < len(table) - 1 or different(table[1:]):
        return named([workers[row] for row in rows])
    return f"worker {workers[0]}" if len(rows) > 1 else f"worker {workers[0]} or worker {workers[1]}"


def named(workers: Sequence[int]) -> str:
    """'worker 1', 'workers 1, 2 and 5'."""
    *most, last = map(str, workers)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"
