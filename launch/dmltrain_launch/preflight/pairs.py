"""Which pairs of hosts measure their throughput, and in which order. Pure.

In a round every host is in at most one pair, so that no two measurements share a link. With few hosts every pair is
measured. With many, every host is measured with its two neighbours in a ring: a slow host then shows in two pairs, and
a slow path between two hosts in one. Afterwards the slowest pair is measured once more by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FEW = 8  # hosts; 7 rounds
Pair = tuple[str, str]  # the connecting host, the accepting host
Paths = Mapping[str, Mapping[str, Mapping[str, Any]]]  # {from: {to: what was found}}, hosts by name


def rounds(names: Sequence[str], few: int = FEW) -> list[list[Pair]]:
    """The rounds, each a list of pairs that measure at the same time."""
    return _every_pair(names) if len(names) <= few else _ring(names)


def _every_pair(names: Sequence[str]) -> list[list[Pair]]:
    """A round-robin by the circle method: the first stays, the others rotate; "" fills up an odd number."""
    circle = [*names, *[""] * (len(names) % 2)]
    rounds = []
    for _ in circle[1:]:
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([pair for pair in pairs if all(pair)])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _ring(names: Sequence[str]) -> list[list[Pair]]:
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    even = len(pairs) // 2 * 2
    return [each for each in (pairs[0:even:2], pairs[1:even:2], pairs[even:]) if each]


def slowest(measured: Paths) -> Pair | None:
    """(from, to) of the lowest throughput; None if nothing was measured. `measured` as in `Check.throughput`."""
    speeds = {
        (name, peer): path["speed"]
        for name, peers in measured.items()
        for peer, path in peers.items()
        if "speed" in path
    }
    return min(speeds, key=lambda pair: speeds[pair], default=None)
