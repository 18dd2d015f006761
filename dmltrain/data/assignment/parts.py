"""The parts of an epoch: which samples a worker sees in which step, and their random words.

`Shared` divides one data set among all workers (partition.py). `Local` is for workers that have files of their own, of
any sizes: each permutes its own samples, and has a share of every step in proportion to them, so all finish together.

Both depend on nothing but seed and epoch. `Epoch` has the sample at each position of a shared epoch, whichever worker
gets it. The random word of a sample depends on the seed, the epoch and the position of the sample in the epoch only.
Words are computed for each batch: those of an epoch of 14 million samples would take 112 MB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.assignment import partition

NEAR = 4096  # positions; computing the words between two positions costs no more than another generator


@dataclass(frozen=True, eq=False)
class Part:
    """A worker's part of an epoch.

    order: its samples, int64 (n,). steps: the number of its batches. bounds(batch): start and end of the batch in
    `order`, at most batch_size samples. words(start, stop): the random words of order[start:stop], uint64. window: the
    samples of so many consecutive positions of `order` lie in a few places of the disk; 0: they lie anywhere.
    group: so many batches make a round; the last round may have fewer.
    """

    order: Array
    steps: int
    batch_size: int
    bounds: Callable[[int], tuple[int, int]]
    words: Callable[[int, int], Array]
    window: int = 0
    group: int = 1

    def batches_of(self, round: int) -> range:
        """The numbers of the batches of a round."""
        return range(round * self.group, min(self.steps, (round + 1) * self.group))

    def between(self, first: int, stop: int) -> Part:
        """Its rounds `first` to `stop` - 1, with numbers from 0 on."""
        batches, bounds = range(first * self.group, min(self.steps, stop * self.group)), self.bounds
        return replace(self, steps=len(batches), bounds=lambda batch: bounds(batches.start + batch))

    def in_batches(self, size: int) -> Part:
        """The same rounds, each of one batch, in batches of `size` samples. The last batches of a round may be smaller,
        down to 0 samples."""
        group, whole = -(-self.batch_size // size), self.bounds

        def bounds(batch: int) -> tuple[int, int]:
            start, end = whole(batch // group)
            first = start + batch % group * size
            return min(first, end), min(first + size, end)

        return replace(self, steps=self.steps * group, batch_size=size, bounds=bounds, group=group)


class Parts(Protocol):
    """How the epochs of a run are divided among the workers; the same on all workers."""

    @property
    def samples(self) -> int:
        """The number of samples in an epoch, of all workers together."""

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""

    def step_sizes(self, step: int) -> list[int]:
        """The number of samples of each worker in that step, by rank."""

    def part(self, rank: int, seed: int, epoch: int) -> Part: ...


@dataclass(frozen=True)
class Shared:
    """One data set of `num_examples` samples, divided among all workers. An epoch has `samples` of them.

    `samples` may be larger than `num_examples`. The epochs are pieces of an endless row of passes over the data. Each
    pass has an order and random words of its own, as if it were an epoch.
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
        whole, workers = Epoch(self, seed, epoch), self.num_workers
        order = whole.every(rank, workers)

        def bounds(step: int) -> tuple[int, int]:
            return min(len(order), step * self.batch_size), min(len(order), (step + 1) * self.batch_size)

        def words(start: int, stop: int) -> Array:
            return whole.words(rank + start * workers, rank + stop * workers)[::workers]

        return Part(order, self.steps, self.batch_size, bounds, words, window(self.shuffle, workers))

    def passes(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The pieces of positions `begin` to `end` - 1 in the row of passes: (pass, position in it, count)."""
        pieces, size = [], self.num_examples
        while begin < end:
            number, first = divmod(begin, size)
            count = min(size - first, end - begin)
            pieces.append((number, first, count))
            begin += count
        return pieces


@dataclass(frozen=True)
class Epoch:
    """Epoch `number` of a shared data set: what is at its positions 0 to samples - 1, whichever worker gets them."""

    shared: Shared
    seed: int
    number: int

    def every(self, first: int, step: int) -> Array:
        """The samples at positions first, first + step, ... to the epoch's end, int64."""
        pieces = [
            order[first - done if first > done else (first - done) % step :: step] for done, order in self._orders()
        ]
        # np.concatenate copies, so the memory of the whole order is freed.
        return pieces[0] if len(pieces) == step == 1 else np.concatenate(pieces)

    def samples_at(self, positions: Array) -> Array:
        """The samples at these positions, in any order; int64, like `positions`."""
        samples = np.empty(len(positions), np.int64)
        for done, order in self._kept_orders:
            inside = np.flatnonzero((positions >= done) & (positions < done + len(order)))
            samples[inside] = order[positions[inside] - done]
        return samples

    def words(self, first: int, stop: int) -> Array:
        """The random words of positions first to stop - 1, uint64; those after the epoch's end are the next epoch's."""
        begin = self.number * self.shared.samples
        pieces = [
            random_bits.words_from(start, count, self.seed, number, random_bits.AUGMENTATION)
            for number, start, count in self.shared.passes(begin + first, begin + stop)
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)

    def words_at(self, positions: Array) -> Array:
        """The random words of these positions, in any order, uint64. Quick where they ascend in small steps."""
        if not len(positions):
            return self.words(0, 0)
        steps = np.diff(positions)
        runs = np.split(positions, np.flatnonzero((steps < 0) | (steps > NEAR)) + 1)
        return np.concatenate([self.words(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs])

    @functools.cached_property
    def _kept_orders(self) -> list[tuple[int, Array]]:
        """Members of an elastic job ask at each stop and in each view. In uint32, half of the memory, where it fits."""
        small = self.shared.num_examples <= np.iinfo(np.uint32).max
        return [(done, order.astype(np.uint32) if small else order) for done, order in self._orders()]

    def _orders(self) -> Iterator[tuple[int, Array]]:
        """For each pass in turn: how many positions of the epoch are before it, and its samples in this epoch."""
        shared, begin = self.shared, self.number * self.shared.samples
        permute = partition.SHUFFLES[shared.shuffle]
        for number, first, count in shared.passes(begin, begin + shared.samples):
            order = permute(shared.num_examples, self.seed, number)[first : first + count]
            yield number * shared.num_examples + first - begin, order


@dataclass(frozen=True)
class Local:
    """Worker r has sizes[r] samples of its own. They are spread evenly over the steps of the epoch."""

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
        return Part(order, self.steps, self.batch_size, partial(self._bounds, rank), words, window(self.shuffle, 1))


def window(shuffle: str, num_workers: int) -> int:
    """`Part.window` of a worker, if there are `num_workers` workers."""
    return max(1, partition.WINDOW // num_workers) if shuffle == "chunk" else 0
