"""How the samples of a step are divided among workers of unequal speed. Pure.

Each member reports how many samples it computes per second, without its waits for others. A step takes as long as its
slowest member, so the best parts take all members equally long. When all have reported, and the best parts would make
the computing of a step shorter by GAIN, they are proposed for the next view. Hosts of equal speed never get there.

The time of a part is about a + b * samples, so a speed holds only for the part with which it was measured. No model is
needed for that: reports count only in the view in which they were made, and each new division comes nearer to equal
times. Its error (in the logarithm of a part) shrinks each time by the factor a / (a + b * samples).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from dmltrain.kvstore.view import Balancing, View

GAIN = 1.05  # the least ratio of a step's computing before and after
PAUSE = 5.0  # s, between two proposals
LEAST = 1 / 8  # of the equal part: the smallest part of a member
SLOWEST = 1e-6  # of the fastest member's speed: what counts as its speed at least


class Balance:
    """`proposal`: shares that wait for the next view, or none. `settings.batch` 0: nothing is ever divided."""

    def __init__(self, settings: Balancing) -> None:
        self.settings = settings
        self.proposal: tuple[int, ...] = ()
        self._speeds: dict[int, float] = {}  # of this view since the last decision, samples per second
        self._proposed = -math.inf  # s, when

    def report(self, view: View, member: int, speed: float, now: float) -> bool:
        """A member of the present view has measured its speed. Returns whether there is a new proposal."""
        self._speeds[member] = speed
        total = self.settings.size(len(view.members))
        if total < len(view.members) or self.proposal or now - self._proposed < PAUSE:
            return False
        if not self._speeds.keys() >= set(view.members):
            return False
        speeds = [self._speeds.pop(member) for member in view.members]  # the next decision needs new ones of all
        shares = divided(speeds, total, self.settings.limit)
        if seconds(self._present(view), speeds) < GAIN * seconds(shares, speeds):
            return False
        self.proposal, self._proposed = shares, now
        return True

    def next_view(self, before: View, view: View) -> View:
        """`view`, which follows `before`, with shares: the proposed ones, or else those of `before`. If members are
        gone, the shares of the others keep their proportion. A member that has joined gets an equal part."""
        shares, self.proposal = self.proposal or before.shares, ()
        self._speeds.clear()
        if not shares or view.members == before.members:
            return replace(view, shares=shares)
        known = dict(zip(before.members, shares, strict=True))
        stayed = [known[member] for member in view.members if member in known]
        mean, total = sum(stayed) / len(stayed), self.settings.size(len(view.members))
        if total < len(view.members):
            return replace(view, shares=())
        weights = [known.get(member, mean) for member in view.members]
        return replace(view, shares=divided(weights, total, self.settings.limit))

    def _present(self, view: View) -> Sequence[float]:
        count = len(view.members)
        return view.shares or [self.settings.size(count) / count] * count


def divided(speeds: Sequence[float], total: int, limit: float) -> tuple[int, ...]:
    """Divide `total` samples, at least one for each member, so that all members compute equally long, as far as whole
    samples and the bounds permit: each part is from LEAST to `limit` times the equal one."""
    speeds = [max(speed, SLOWEST * max(speeds)) for speed in speeds]
    equal = total / len(speeds)
    low, high = max(1, int(LEAST * equal)), max(math.ceil(equal), int(limit * equal))
    enough, too_long = 0.0, high / min(speeds)  # s
    for _ in range(60):
        middle = (enough + too_long) / 2
        if sum(min(max(speed * middle, low), high) for speed in speeds) <= total:
            enough = middle
        else:
            too_long = middle
    shares = [int(min(max(speed * enough, low), high)) for speed in speeds]
    ends = [((share + 1) / speed, place) for place, (share, speed) in enumerate(zip(shares, speeds, strict=True))]
    heapq.heapify(ends)
    while sum(shares) < total:  # rounding down has left some: each goes to the member that would finish first
        _, place = heapq.heappop(ends)
        if shares[place] < high:
            shares[place] += 1
            heapq.heappush(ends, ((shares[place] + 1) / speeds[place], place))
    return tuple(shares)


def seconds(parts: Sequence[float], speeds: Sequence[float]) -> float:
    """How long the computing of a step takes, s."""
    return max(part / speed for part, speed in zip(parts, speeds, strict=True))
