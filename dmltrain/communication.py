"""An epoch's time, by what it went for: the line `Epoch[k] Communication: ...` of the log (docs/performance.md).

Compute is all in which the training thread did not wait for the kvstore; where waits went is told by the store
(kvstore/waiting.py). An epoch is here the steps, the barrier behind them and the merging of statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dmltrain.kvstore import KVStore
from dmltrain.kvstore.waiting import Waits


@dataclass(frozen=True)
class Mark:
    """A moment, and what the store had counted until then."""

    seconds: float
    waits: Waits


def mark(store: KVStore, clock: Callable[[], float] = time.perf_counter) -> Mark | None:
    """None where nobody counts: one worker alone, MXNet's own kvstores."""
    return None if store.waits is None else Mark(clock(), store.waits)


def between(start: Mark, end: Mark) -> dict[str, float]:
    """What the line says, in its order: seconds, by their names."""
    waits = end.waits - start.waits
    compute = max(0.0, end.seconds - start.seconds - waits.total)
    return {"compute": compute, "own-host": waits.own_host, "wire": waits.wire, "server": waits.server,
            "straggler": waits.straggler}
