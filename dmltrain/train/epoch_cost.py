"""What an epoch of training cost: speed, memory, bytes, and how its time was spent.

The last is the line `Epoch[k] Communication: ...` of the log (docs/performance.md).

`compute` is the time in which the training thread did not wait for the kvstore. The store reports the reasons of the
waits (kvstore/waiting.py). The time covers an epoch's steps, the barrier after them and the merging of statistics.

`bound` compares this time with a lower bound. No schedule takes less than max(compute, T), where T is the least time in
which this worker's host can transfer the bytes (worker/links/bound.py). `bound` is this minimum divided by the time
that the epoch took. If it is 1, only faster computation or fewer bytes can make an epoch shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.waiting import Waits
from dmltrain.logs import record
from dmltrain.train.run import Run


@dataclass(frozen=True)
class Cost:
    """What an epoch of training cost."""

    speed: float  # samples per second, of this worker
    learning_rate: float  # of its last step
    sent_before: int  # bytes, until the epoch's start
    received_before: int
    spent: Mapping[str, float]  # see spent_between; empty for stores without counters
    used: Mapping[str, float]  # see record.usage


@dataclass(frozen=True)
class Mark:
    """A point in time, and the store's counters at that time."""

    seconds: float
    waits: Waits
    carried: Any  # the result of KVStore.carried


def mark(store: KVStore, clock: Callable[[], float] = time.perf_counter) -> Mark | None:
    """None for stores without counters: a single worker, MXNet's kvstores."""
    return None if store.waits is None else Mark(clock(), store.waits, store.carried())


def spent_between(store: KVStore, start: Mark, end: Mark) -> dict[str, float]:
    """The values of the line, in its order: first `bound`, a fraction, then seconds. Every worker must call this."""
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


def shares(spent: Mapping[str, float]) -> dict[str, float]:
    """The result of `spent_between`, with seconds replaced by fractions of their sum."""
    parts = {name: value for name, value in spent.items() if name != "bound"}
    whole = sum(parts.values())
    return {name: value if name == "bound" else value / whole for name, value in spent.items() if whole}


def report(run: Run, epoch: int, cost: Cost) -> None:
    """Log what the epoch cost. Bytes include those of validation."""
    from dmltrain.usage import hardware

    store, memory = run.store, run.trainer.device_memory()
    staleness = None if store.kvstore_type.synchronous else store.take_staleness()  # MXNet does not count it
    run.log_values(
        epoch,
        {
            "Speed": cost.speed,
            "Memory": hardware.peak_memory(),
            **({} if memory is None else {"Device-Memory": memory}),
            "Sent": store.bytes_sent - cost.sent_before,
            "Received": store.bytes_received - cost.received_before,
            "Learning-rate": cost.learning_rate,
            **({} if staleness is None else {"Staleness": staleness}),
        },
    )
    if cost.spent:
        run.log.info(record.communication(epoch, cost.spent))
        run.board.spent(epoch, "communication", shares(cost.spent))
    run.log.info(record.usage(epoch, cost.used))
    run.board.spent(epoch, "usage", cost.used)
