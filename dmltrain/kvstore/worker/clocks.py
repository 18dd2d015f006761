"""How many steps each worker of an elastic job holds if it makes steps of its own: what all tell in a new view."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array

CLOCK, BEGUN, AGE, LEAST, MOST = range(5)  # rows of a table: of workers in the view, of those that have left


@dataclass(frozen=True)
class Clocks:
    """`members`: how many steps each worker in the view holds, without those that are new. `begun`: those of them that
    are in the middle of a step. `gone`: of workers that have left the steps that all slices have; without those of whom
    the servers know nothing. `partly`: those of them that have one more step in some slices. `freshest`: the member
    whose weights are the newest."""

    members: Mapping[int, int]
    begun: Collection[int] = ()
    gone: Mapping[int, int] = field(default_factory=dict)
    partly: Collection[int] = ()
    freshest: int = -1

    @property
    def start(self) -> int:
        """Nobody is beyond this clock, or was in the middle of a step after it."""
        here = (clock + (member in self.begun) for member, clock in self.members.items())
        return max(*here, *(clock + 1 for clock in self.gone.values()), 0)

    @property
    def counted(self) -> dict[int, int]:
        """How many steps of each worker count; without those of whom nothing is known."""
        return {**self.gone, **self.members}


def table_of(ranks: int) -> Array:
    """What a worker tells of itself and others, float64 (5, ranks): nothing yet."""
    return np.zeros((MOST + 1, ranks))


def add_own(table: Array, member: int, clock: int, begun: bool, age: float) -> None:
    """Put in what a worker that is not new holds. `age`: s since it got its weights."""
    table[[CLOCK, BEGUN, AGE], member] = clock + 1, begun, age


def add_gone(table: Array, answers: Iterable[Array]) -> None:
    """Put in what the servers have of workers that have left: of each server rows of (worker, least, most)."""
    for worker, least, most in (row for rows in answers for row in rows.tolist()):
        known = table[LEAST, worker]
        table[LEAST, worker] = min(known, least + 1) if known else least + 1
        table[MOST, worker] = max(table[MOST, worker], most + 1)


def read(table: Array) -> Clocks:
    """The sum of all workers' tables."""
    here, left = np.flatnonzero(table[CLOCK]).tolist(), np.flatnonzero(table[LEAST]).tolist()
    return Clocks(
        {member: int(table[CLOCK, member]) - 1 for member in here},
        tuple(member for member in here if table[BEGUN, member]),
        {member: int(table[LEAST, member]) - 1 for member in left if member not in here},
        tuple(member for member in left if table[MOST, member] > table[LEAST, member] and member not in here),
        min(here, key=lambda member: (table[AGE, member], member), default=-1),
    )
