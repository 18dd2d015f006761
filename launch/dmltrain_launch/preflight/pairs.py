"""Which pairs of hosts measure their throughput, and in which order. Pure.

In a round every host is in at most one pair, so that no two measurements share a link. With few hosts every pair is
measured. With many, every host is measured with its two neighbours in a ring: a slow host then shows in two pairs, and
a slow path between two hosts in one. Afterwards the slowest pair is measured once more by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmltrain_launch.agent.events import Measured

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


class Throughput:
    """The measurements between hosts that reach each other. `measured`: from, to: {"speed": bits/s} or {"error"}."""

    def __init__(self) -> None:
        self.measured: dict[str, dict[str, dict[str, Any]]] = {}
        self._names: list[str] = []
        self._rounds: list[list[Pair]] = []  # still to do
        self._repeated = False  # whether the slowest pair was measured again

    def begin(self, names: Sequence[str], reached: Paths) -> None:
        """Plan the rounds of these hosts. `reached`: what each of them has found of the others."""

        def reach_each_other(pair: Pair) -> bool:
            return all("ms" in reached[a].get(b, {}) for a, b in (pair, pair[::-1]))

        self._names = list(names)
        self._rounds = [list(filter(reach_each_other, pairs)) for pairs in rounds(self._names)]

    def next_round(self) -> list[Pair]:
        """The pairs to measure now; after the last round the slowest one again; then []."""
        self._rounds = [pairs for pairs in self._rounds if pairs]
        if not self._rounds and not self._repeated:
            self._repeated = True
            again = slowest(self.measured)
            self._rounds = [[again]] if again and len(self._names) > 2 else []
        return self._rounds.pop(0) if self._rounds else []

    def take(self, event: Measured) -> None:
        """Of two measurements the better one counts: other traffic slowed down the other."""
        for name, other, speed in ((event.host, event.peer, event.out), (event.peer, event.host, event.back)):
            before = self.measured.setdefault(name, {}).get(other, {})
            if event.error and not before:
                self.measured[name][other] = {"error": event.error}
            elif not event.error:
                self.measured[name][other] = {"speed": max(speed, before.get("speed", 0))}
