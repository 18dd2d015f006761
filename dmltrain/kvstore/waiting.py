"""Where a worker waits for its kvstore: the seconds in which its training thread stands still, by what held it up.

Theory of operation. Slices travel at the same time, so seconds summed over them are no seconds of an epoch. What counts
is the thread that waits: it goes on when the last slice that it waits for has landed, and that slice's trip, from its
push (a pull, where servers step at once) to its landing, tells what the wait was for. In this order:

- straggler: until the last worker's gradient was ready, too (workers tell servers for how long a push has waited to be
  sent, so a server knows who was late, and not only whose wire is slow, and tells the others by how long);
- then, mixed: the server's own seconds (it tells them, too); own host's, which are what this link's two threads spent
  on copying, encoding and decoding, of this slice and of others that it had to wait for; and the rest, the wire.

Only what overlaps the wait is counted: what happened while the training thread computed cost nothing. In the mixed part
the server's and the own host's seconds are taken as spread evenly. Inside a host, where slices stay in shared memory,
there is no wire: the rest is the own host's (handing over between processes). The four always add up to the wait.
It costs two clock readings a wait, one a key and a slice pushed, and two a slice that is copied or coded.

What it cannot see: the time in which a busy machine gives a thread no core looks like the wire, and so does a server's
thread that is slow to read. A worker's wait for another one whose wire is slow is the wire's, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    """A wait from `since` to `until`, which ended when the slice of `trip` landed; None: a request to a server."""
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
