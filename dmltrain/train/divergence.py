"""Whether all workers of a synchronous job still have the same weights, at the end of each epoch.

All workers make the same steps with the same sums, so their arrays are equal, bit for bit. They compare digests.
Processors of different kinds may round the same step differently. So if the digests differ, worker 0 sends its arrays
through the servers one by one, and all workers compare their own with these and then take these. The difference of an
array is the largest difference of two elements, divided by the largest absolute value in worker 0's array.

Roundings of n steps add up like a random walk: to about sqrt(n) times half a unit in the last place (2^-24 of a
float32's value). 128 times that is the limit for rounding. A larger difference is a fault, of memory or of the program,
and ends the job.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray
from dmltrain.base.arrays import Array
from dmltrain.base.errors import Diverged
from dmltrain.kvstore import agreement
from dmltrain.train.run import Run

ROUNDING = 2.0**-17  # limit of a relative difference after one step
SMALLEST = 1e-30  # in place of a smaller largest value: some processors replace values below 1e-38 by zero


def check(run: Run, epoch: int) -> None:
    """Compare the workers' arrays. Every worker must call this when its weights include the last step. Raises Diverged,
    JobLost."""
    store = run.store
    if store.num_workers == 1 or not store.kvstore_type.synchronous:
        return
    arrays = sorted(run.trainer.common_arrays(), key=lambda array: array.name)
    digest = weights.digest_each((array.name, array.read()) for array in arrays)
    table = agreement.rows(store, "state", agreement.words(digest))
    if agreement.different(table):
        _check_layout(run, epoch, arrays)
        _take_worker_0s(run, epoch, arrays, table)


def _check_layout(run: Run, epoch: int, arrays: Sequence[CommonArray]) -> None:
    """Raise Diverged unless all workers have arrays of the same names and shapes."""
    layout = repr([(array.name, array.read().dtype.str, array.read().shape) for array in arrays])
    digest = hashlib.sha256(layout.encode()).hexdigest()
    rows = agreement.different(agreement.rows(run.store, "names of the state", agreement.words(digest)))
    if rows:
        others = agreement.named(run.store.members(rows))
        raise Diverged(
            f"epoch {epoch}: {others} and worker {run.store.members([0])[0]} have arrays of other names or shapes: "
            "start all workers with the same program, options and version"
        )


def _take_worker_0s(run: Run, epoch: int, arrays: Sequence[CommonArray], digests: Array) -> None:
    """Compare all arrays with worker 0's, and replace them. Raises Diverged if they differ by more than rounding."""
    differences, later = [], []
    for array in arrays:
        expected = _worker_0s(run, array)
        differences.append(relative_difference(np.ascontiguousarray(array.read()), expected))
        if run.store.elastic:  # the comparison may have to be repeated: see KVStore.repeat
            later.append((array, expected))
        else:
            array.write(expected)
    largest = max(range(len(differences)), key=differences.__getitem__)
    table = agreement.rows(run.store, "differences of the state", [differences[largest], largest])
    for array, expected in later:
        array.write(expected)
    limit = ROUNDING * math.sqrt(run.plan.steps)
    names = [array.name for array in arrays]
    workers = run.store.members(range(len(table)))
    if too_large := _described(table, workers, names, limit):
        suspects = agreement.suspects(digests, np.flatnonzero(table[:, 0] > limit).tolist(), workers)
        raise Diverged(
            f"epoch {epoch}: weights or the optimizer's state differ from worker 0's: {too_large}. Rounding explains "
            f"{limit:.1e} at most: this is a fault of memory, or of code that changes weights on one worker. Look at "
            f"{suspects}, and resume with --load-epoch last"
        )
    rounded = _described(table, workers, names, 0.0) or "workers without a difference in value"  # bits of zeros or NaN
    run.log.warning("Epoch[%d] rounded unlike worker 0: %s; all workers took worker 0's state", epoch, rounded)


def _described(table: Array, workers: Sequence[int], names: Sequence[str], limit: float) -> str:
    """The workers (of each row) whose difference (first column) is above `limit`, with the array (second column)."""
    return ", ".join(
        f"worker {worker} ({difference:.1e} of the largest value in {names[int(number)]})"
        for worker, (difference, number) in zip(workers, table, strict=True)
        if difference > limit
    )


def _worker_0s(run: Run, array: CommonArray) -> Array:
    """Worker 0's values of the array."""
    values = np.ascontiguousarray(array.read()).copy()
    run.store.broadcast(values.reshape(-1).view(np.uint8))
    return values


def relative_difference(own: Array, expected: Array) -> float:
    """The largest difference of two elements, relative to the largest absolute value of `expected`; infinity if an
    element is finite in one of them only. NaN equals NaN."""
    unlike = ~((own == expected) | (np.isnan(own) & np.isnan(expected)))
    if not unlike.any():
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        gap = float(np.abs(own[unlike] - expected[unlike]).max())
    finite = np.abs(expected[np.isfinite(expected)])
    return gap / max(float(finite.max(initial=0.0)), SMALLEST) if math.isfinite(gap) else math.inf
