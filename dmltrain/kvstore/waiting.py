"""How long a worker's training thread waits for its kvstore, by cause, and how long it computes in a step.

Theory of operation. Slices travel at the same time, so their seconds cannot be added. The training thread counts: it
continues when the last slice that it waits for has arrived, and the trip of that slice explains the wait. A trip lasts
from the push (the pull, where servers step at once) to the arrival of the value. The causes are, in this order:

- straggler: until the last worker's gradient was ready. Workers report to the server how long a push has waited to be
  sent. So the server can distinguish a late worker from a slow wire; it reports the delay to the other workers.
- then, mixed: the server's own seconds, which it reports; the own host's seconds, in which this link's two threads
  copied, encoded and decoded this slice and others before it; and the rest, the wire.

Only what overlaps the wait is counted: work during the training thread's computation costs nothing. In the mixed phase
the server's and the own host's seconds are assumed to be spread evenly. Inside a host, where slices stay in shared
memory, there is no wire: the rest is the own host's (hand-over between processes). The four always add up to the wait.
The cost is two clock readings for each wait, one for each key and slice pushed, and two for each slice that is copied
or encoded.

Limits: when a busy machine gives a thread no core, that time looks like the wire, and so does a server's thread that
reads slowly. A worker's wait for another worker with a slow wire also counts as the wire's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REPORT_STEPS = 5  # of a report, at least
REPORT_SECONDS = 5.0  # between two reports, at least


@dataclass(frozen=True)
class Waits:
    """Seconds for which the training thread waited, by what it waited for."""

    own_host: float = 0.0
    wire: float = 0.0
    server: float = 0.0
    straggler: float = 0.0

    @property
    def total(self) -> float:
        return self.own_host + self.wire + self.server + self.straggler

    def __add__(self, other: Waits) -> Waits:
        return Waits(
            self.own_host + other.own_host,
            self.wire + other.wire,
            self.server + other.server,
            self.straggler + other.straggler,
        )

    def __sub__(self, other: Waits) -> Waits:
        return Waits(
            self.own_host - other.own_host,
            self.wire - other.wire,
            self.server - other.server,
            self.straggler - other.straggler,
        )


class Trip(NamedTuple):
    """One slice's way to the servers and back."""

    asked: float  # when it was pushed (or pulled), by this process's clock
    waited: float  # s, then, for the last worker's gradient
    worked: float  # s, the server's
    handled: float  # s, this host's: copying and coding
    shared: bool  # through shared memory


def split(trip: Trip | None, since: float, until: float) -> Waits:
    """Divide a wait from `since` to `until` by cause. `trip`: that of the slice whose arrival ended the wait; None: it
    was a request to a server."""
    waited = max(0.0, until - since)
    if trip is None:
        return Waits(server=waited)
    complete = min(until, trip.asked + max(0.0, trip.waited))  # all workers had their gradients
    straggler = min(waited, max(0.0, complete - since))
    rest = waited - straggler
    whole, mixed = until - trip.asked, until - complete  # the trip, and its part without stragglers
    server = min(rest, rest * trip.worked / mixed) if mixed > 0 else 0.0
    own = rest - server if trip.shared else min(rest - server, rest * trip.handled / whole if whole > 0 else 0.0)
    return Waits(own, rest - server - own, server, straggler)


class StepTimer:
    """How long this worker computes in a step, as rules about stragglers need it: the time from one step to the next
    without the training thread's waits for servers and other workers. A report is the median of some steps, so that a
    validation between two of them does not matter."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # when the last step ended, and the waits until then, s
        self._since = 0.0  # s, the last report
        self._times: list[float] = []  # since then

    def made(self, now: float, waited: float) -> float | None:
        """A step has been made; `waited`: all waits so far, s. Returns seconds to report, or None."""
        before, self._last = self._last, (now, waited)
        if before is None:
            self._since = now
            return None
        self._times.append(max(0.0, now - before[0] - (waited - before[1])))
        if len(self._times) < REPORT_STEPS or now - self._since < REPORT_SECONDS:
            return None
        ordered, self._since = sorted(self._times), now
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        self._times.clear()
        return median or None
