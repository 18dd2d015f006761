"""How many steps each worker of an elastic job holds if workers make steps of their own. All members exchange this at
the beginning of a view."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array

CLOCK, BEGUN, AGE, LEAST, MOST = range(5)  # rows of a table: three of workers in the view, two of those that have left


@dataclass(frozen=True)
class Clocks:
    """`members`: how many steps each worker in the view holds, without new ones. `begun`: the members that are in the
    middle of a step. `gone`: worker that has left -> how many of its steps all slices contain; without workers of which
    the servers know nothing. `partly`: the workers of `gone` that have one more step in some slices. `freshest`: the
    member with the newest weights."""

    members: Mapping[int, int]
    begun: Collection[int] = ()
    gone: Mapping[int, int] = field(default_factory=dict)
    partly: Collection[int] = ()
    freshest: int = -1

    @property
    def start(self) -> int:
        """The lowest clock from which all can go on: no worker holds a later step, or has begun one."""
        here = (clock + (member in self.begun) for member, clock in self.members.items())
        return max(*here, *(clock + 1 for clock in self.gone.values()), 0)

    @property
    def counted(self) -> dict[int, int]:
        """How many steps of each worker count; without workers of which nothing is known."""
        return {**self.gone, **self.members}


def table_of(ranks: int) -> Array:
    """An empty table, float64 (5, ranks), of what one worker knows about itself and others."""
    return np.zeros((MOST + 1, ranks))


def add_own(table: Array, member: int, clock: int, begun: bool, age: float) -> None:
    """Enter how many steps a worker holds that is not new. `age`: s since it got its weights."""
    table[[CLOCK, BEGUN, AGE], member] = clock + 1, begun, age


def add_gone(table: Array, answers: Iterable[Array]) -> None:
    """Enter what the servers know of workers that have left: from each server rows of (worker, least, most)."""
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
