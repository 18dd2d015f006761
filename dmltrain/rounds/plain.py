"""The rounds of an epoch in a job that is not elastic. rounds/member_rounds.py has those of one that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.parts import Part
from dmltrain.data.assignment.sync_assignment import SyncAssignment


class Rounds(Protocol):
    """See rounds/member_rounds.py."""

    @property
    def assignment(self) -> SyncAssignment | AsyncAssignment | None:
        """None if the members never change."""

    @property
    def step(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def has_moved(self) -> bool: ...

    @property
    def checksum(self) -> Array | None:
        """None in a job whose members never change."""

    def is_over(self) -> bool: ...

    def part(self) -> Part: ...

    def begin(self) -> tuple[Array, int]: ...

    def end(self, checksums: Array) -> bool: ...

    def go_on(self, stop: int) -> None: ...


class PlainRounds:
    """The rounds of an epoch, from number `first` to `stop` - 1, in a job that always has the same workers. `part`:
    this worker's, from round `first` on. `total(round)`: how many samples all workers have in a round; None: each
    worker makes steps of its own. A position is an index into the order of `part`."""

    assignment = checksum = None
    has_moved = False

    def __init__(self, part: Part, total: Callable[[int], int] | None, first: int, stop: int) -> None:
        self._part, self._total, self._first, self.step, self.stop = part, total, first, first, stop

    @property
    def count(self) -> int:
        return self.step

    def is_over(self) -> bool:
        return self.step >= self.stop

    def go_on(self, stop: int) -> None:
        self.stop = stop

    def part(self) -> Part:
        """The same one each time: the samples of later rounds may be prepared already."""
        return self._part

    def begin(self) -> tuple[Array, int]:
        batches = self._part.batches_of(self.step - self._first)
        positions = np.arange(self._part.bounds(batches[0])[0], self._part.bounds(batches[-1])[1])
        return positions, self._total(self.step) if self._total else max(1, len(positions))

    def end(self, checksums: Array) -> bool:
        self.step += 1
        return self.is_over()
