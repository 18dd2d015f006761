"""Which hosts measure their throughput with which, and when. Pure.

In a round every host is in one pair at most, so that no host's link is shared. Few hosts: every pair. Many: every host
with its two neighbours in a ring, so that a slow host shows in two pairs and a slow path between two hosts in one.
Afterwards the slowest pair measures once more, alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FEW = 8  # hosts; 7 rounds
Pair = tuple[str, str]  # the one that calls, the one that is called
Paths = Mapping[str, Mapping[str, Mapping[str, Any]]]  # {from: {to: what was found}}, hosts by name


def rounds(names: Sequence[str], few: int = FEW) -> list[list[Pair]]:
    """The rounds, one after another."""
    return _every_pair(names) if len(names) <= few else _ring(names)


def _every_pair(names: Sequence[str]) -> list[list[Pair]]:
    """A tournament by the circle method: the first stays, the others go round; "" pauses where they are odd."""
    seats = [*names, *[""] * (len(names) % 2)]
    found = []
    for _ in seats[1:]:
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([pair for pair in pairs if all(pair)])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _ring(names: Sequence[str]) -> list[list[Pair]]:
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    even = len(pairs) // 2 * 2
    return [each for each in (pairs[0:even:2], pairs[1:even:2], pairs[even:]) if each]


def slowest(measured: Paths) -> Pair | None:
    """From and to of the lowest throughput; None where nothing was measured. `measured` as in `Check.throughput`."""
    speeds = {
        (name, peer): path["speed"]
        for name, peers in measured.items()
        for peer, path in peers.items()
        if "speed" in path
    }
    return min(speeds, key=lambda pair: speeds[pair], default=None)
