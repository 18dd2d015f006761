"""A worker's part in a change of the job's kvstore between two steps: see scheduler/changes.py.

The control thread answers after which step this worker can stop, and learns after which one all change. The training
thread counts its steps. After that step it waits until all its pushes are in the weights, and then for all workers:
now nothing is on its way to a server, and no pull waits. The scheduler tells the servers (`Keys.change` there), and
when they have answered all go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dmltrain.kvstore.transport.message.base import MAX_TEXT
from dmltrain.kvstore.transport.message.changes import ASKS, CANCELLED, Change, Stops

UNKNOWN = (
    "this program does not train with the optimizer on the servers, so nothing can change, or not yet: use --kv-store "
    "dist_ssp or dist_async, or dist_sync with --update-on-kvstore 1; programs that push and pull themselves cannot "
    "change"
)
Refusal = Callable[[Change], str]  # why a change is impossible; "" if it is possible


class WorkerChanges:
    """`report` sends a message to the scheduler. Until `follow`, all changes are refused."""

    def __init__(self, report: Callable[[Stops], None]) -> None:
        self._report = report
        self._refusal: Refusal = lambda change: UNKNOWN
        self._lock = threading.Lock()  # guards what follows
        self._steps = 0
        self._change: Change | None = None  # that is to come

    def follow(self, refusal: Refusal) -> None:
        """From now on the program says when it has made a step."""
        with self._lock:
            self._refusal = refusal

    def take(self, change: Change) -> None:
        """The scheduler asks, or decides. On the control thread."""
        with self._lock:
            if change.after != ASKS:
                known = self._change is not None and self._change.number == change.number
                if known:
                    self._change = None if change.after == CANCELLED else change
                return
            why = self._refusal(change)[:MAX_TEXT]
            self._change = None if why else change
            self._report(Stops(change.number, self._steps + 1, why))

    def step_made(self) -> bool:
        """One more step is made. Returns whether a change may come after it: then wait until `decided`."""
        with self._lock:
            self._steps += 1
            return self._change is not None

    def decided(self) -> bool:
        """Whether it is known if a change comes after the last step."""
        with self._lock:
            return self._change is None or self._change.after != ASKS

    def take_due(self) -> Change | None:
        """The change that comes after the last step, once."""
        with self._lock:
            if self._change is None or self._change.after != self._steps:
                return None
            change, self._change = self._change, None
            return change


def why_fixed(compressed: bool, relays: bool) -> str:
    """Why a store cannot change between kvstores whose workers make each step together and others; empty if it can.
    `compressed`: it compresses gradients. `relays`: some hosts send the sum of their workers."""
    if compressed:
        return (
            "with gradient compression a job cannot change between kvstores where each step is one of all workers, and "
            "others: its threshold is for one of them. Start it without --gc-type"
        )
    if relays:
        return "hosts send the sums of their workers, which only dist_sync has: start the job with --host-sum off"
    return ""
