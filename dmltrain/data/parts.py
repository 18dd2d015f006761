"""The parts of an epoch: which samples a worker sees in which step, and their random words.

`Shared` deals one data set out to all workers (partition.py). `Local` is for workers that have files of their own, of
any sizes: each permutes its own samples, and each has its share of every step, so that all finish together.

Both are values that follow from seed and epoch. A sample's random word depends on seed, epoch and the sample's position
in the epoch only. Words are made for each batch: those of an epoch of 14 million samples would take 112 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from dmltrain import random_bits
from dmltrain.arrays import Array
from dmltrain.data import partition
from dmltrain.errors import UserError


@dataclass(frozen=True, eq=False)
class Part:
    """A worker's part of an epoch. order: its samples, int64 (n,); bounds(step): where the step begins and ends in
    `order`, at most batch_size samples; words(start, stop): the random words of these positions of `order`, uint64;
    window: so many positions of `order` have samples of a few places of the disk, 0: it has no windows."""

    order: Array
    steps: int
    batch_size: int
    bounds: Callable[[int], tuple[int, int]]
    words: Callable[[int, int], Array]
    window: int = 0


class Parts(Protocol):
    """How workers share the epochs of a run; the same on all workers."""

    @property
    def samples(self) -> int:
        """In an epoch, of all workers."""

    @property
    def steps(self) -> int:
        """In an epoch."""

    def step_sizes(self, step: int) -> list[int]:
        """Samples of each worker in that step, by rank."""

    def part(self, rank: int, seed: int, epoch: int) -> Part: ...


@dataclass(frozen=True)
class Shared:
    """One data set of `num_examples`, dealt out to all workers. An epoch has `samples` of them.

    If these are more than there are, the epochs are cut out of an endless row of passes over the data, each with an
    order and words of its own, as if it were an epoch.
    """

    num_examples: int
    num_workers: int
    batch_size: int
    samples: int
    shuffle: str = "global"  # a name in partition.SHUFFLES

    @property
    def steps(self) -> int:
        return partition.num_batches(self.samples, self.num_workers, self.batch_size)

    def step_sizes(self, step: int) -> list[int]:
        return partition.step_sizes(self.samples, self.num_workers, self.batch_size, step)

    def part(self, rank: int, seed: int, epoch: int) -> Part:
        begin = epoch * self.samples  # in the row of passes
        pieces, permute = [], partition.SHUFFLES[self.shuffle]
        for number, first, count in self._passes(begin, begin + self.samples):
            order = permute(self.num_examples, seed, number)[first : first + count]
            done = number * self.num_examples + first - begin  # positions of the epoch before this pass
            pieces.append(order[(rank - done) % self.num_workers :: self.num_workers])
        whole = len(pieces) == 1 and self.num_workers == 1
        own = pieces[0] if whole else np.concatenate(pieces)  # a copy: the order of all workers can go

        def bounds(step: int) -> tuple[int, int]:
            return min(len(own), step * self.batch_size), min(len(own), (step + 1) * self.batch_size)

        def words(start: int, stop: int) -> Array:
            position = begin + rank + start * self.num_workers
            return self._words(seed, position, begin + rank + stop * self.num_workers)[:: self.num_workers]

        return Part(own, self.steps, self.batch_size, bounds, words, _window(self.shuffle, self.num_workers))

    def _words(self, seed: int, begin: int, end: int) -> Array:
        """The words of positions begin to end - 1 in the row of passes."""
        found = [
            random_bits.words_from(first, count, seed, number, random_bits.AUGMENTATION)
            for number, first, count in self._passes(begin, end)
        ]
        return np.concatenate(found) if found else np.empty(0, np.uint64)

    def _passes(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(number of the pass, position in it, count) of the pieces of begin to end - 1."""
        pieces, size = [], self.num_examples
        while begin < end:
            number, first = divmod(begin, size)
            count = min(size - first, end - begin)
            pieces.append((number, first, count))
            begin += count
        return pieces


@dataclass(frozen=True)
class Local:
    """Worker r has sizes[r] samples of its own. Sample by sample they are distributed over the steps evenly."""

    sizes: tuple[int, ...]
    batch_size: int
    shuffle: str = "global"
    samples: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", sum(self.sizes))
        if not min(self.sizes):
            raise UserError(f"--data-parts local: worker {self.sizes.index(0)} has no training samples")

    @property
    def steps(self) -> int:
        return -(-max(self.sizes) // self.batch_size)

    def step_sizes(self, step: int) -> list[int]:
        return [stop - start for start, stop in (self._bounds(rank, step) for rank in range(len(self.sizes)))]

    def _bounds(self, rank: int, step: int) -> tuple[int, int]:
        if step >= self.steps:
            return self.sizes[rank], self.sizes[rank]
        return self.sizes[rank] * step // self.steps, self.sizes[rank] * (step + 1) // self.steps

    def part(self, rank: int, seed: int, epoch: int) -> Part:
        begin = sum(self.sizes[:rank])  # of this worker's words, which no other worker shares

        def words(start: int, stop: int) -> Array:
            return random_bits.words_from(begin + start, stop - start, seed, epoch, random_bits.AUGMENTATION)

        order = partition.SHUFFLES[self.shuffle](self.sizes[rank], seed, epoch, begin)
        return Part(order, self.steps, self.batch_size, partial(self._bounds, rank), words, _window(self.shuffle, 1))


def _window(shuffle: str, num_workers: int) -> int:
    """Of one of so many workers."""
    return max(1, partition.WINDOW // num_workers) if shuffle == "chunk" else 0
