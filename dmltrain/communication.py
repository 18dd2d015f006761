"""An epoch's time, by what it went for: the line `Epoch[k] Communication: ...` of the log (docs/performance.md).

Compute is all in which the training thread did not wait for the kvstore; where waits went is told by the store
(kvstore/waiting.py). An epoch is here the steps, the barrier behind them and the merging of statistics. No schedule
beats max(compute, T), T being the least time in which this worker's host can carry what was sent (kvstore/bound.py):
its share of the epoch's time is the share of the bound that was reached, 1 where nothing is left to gain but by
computing faster or sending less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmltrain.kvstore import KVStore
from dmltrain.kvstore.waiting import Waits


@dataclass(frozen=True)
class Mark:
    """A moment, and what the store had counted until then."""

    seconds: float
    waits: Waits
    carried: Any  # as KVStore.carried gave it


def mark(store: KVStore, clock: Callable[[], float] = time.perf_counter) -> Mark | None:
    """None where nobody counts: one worker alone, MXNet's own kvstores."""
    return None if store.waits is None else Mark(clock(), store.waits, store.carried())


def between(store: KVStore, start: Mark, end: Mark) -> dict[str, float]:
    """What the line says, in its order: the share of the bound, then seconds by name. All workers call it alike."""
    waits = end.waits - start.waits
    seconds = end.seconds - start.seconds
    compute, share = max(0.0, seconds - waits.total), {}
    if start.carried is not None and seconds > 0:
        share = {"bound": min(1.0, max(compute, store.bound(end.carried - start.carried, seconds)) / seconds)}
    return {
        **share,
        "compute": compute,
        "own-host": waits.own_host,
        "wire": waits.wire,
        "server": waits.server,
        "straggler": waits.straggler,
    }
