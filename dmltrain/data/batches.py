"""The batches of one epoch, prepared in advance by background threads.

numpy and the image libraries release the interpreter lock, so the consumer computes while threads prepare the next
batches. All threads share the work on the first batch that is not ready. At most `threads + 2` batches are ready, and
no more than fit into `prefetch_bytes`. The consumer gets the threads' exceptions. If it stops early, by `break` or an
exception, the threads end after their current share of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.ahead import ahead
from dmltrain.data.assignment.parts import Part
from dmltrain.data.buffer_pool import Rooms
from dmltrain.data.dataset import ABSENT, Samples
from dmltrain.data.read_ahead import ReadAhead

PREFETCH_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Batch:
    """images uint8 (n, C, H, W) in any order of memory; labels int64 (n,); index: of the batch in the epoch."""

    images: Array
    labels: Array
    index: int


class TrainBatches:
    """One epoch of a worker's training batches: augmented samples in the order of its part.

    There are always `part.steps`; at the end of the epoch they may be smaller, down to (0, C, H, W). first, stop: only
    the batches from number `first` to `stop` - 1, for example those that a resumed epoch still needs.
    """

    def __init__(
        self,
        split: Samples,
        part: Part,
        threads: int = 1,
        prefetch_bytes: int = PREFETCH_BYTES,
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        self._split, self._part, self._threads, self._prefetch_bytes = split, part, threads, prefetch_bytes
        self._indices = range(first, part.steps if stop is None else min(stop, part.steps))

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Generator[Batch, None, None]:
        size, limits = self._part.batch_size, (self._threads, self._prefetch_bytes)
        disk = ReadAhead(self._split, self._part)
        try:
            yield from _prepared(self._split, partial(self._share, disk), self._indices, size, *limits)
        finally:
            disk.close()

    def _share(self, disk: ReadAhead, index: int) -> Share:
        start, stop = self._part.bounds(index)
        disk.reach(start)
        return Share(self._part.order[start:stop], self._part.words(start, stop))


class EvalBatches:
    """A worker's validation batches in the order of its shard, without augmentation; the last may be smaller.

    shard: `partition.validation_shard(...)`; num_batches: None for as many as the shard needs.
    """

    def __init__(
        self,
        split: Samples,
        shard: Array,
        batch_size: int,
        num_batches: int | None = None,
        threads: int = 1,
        prefetch_bytes: int = PREFETCH_BYTES,
    ) -> None:
        self._split, self._shard, self._batch_size = split, shard, batch_size
        self._num_batches = -(-len(shard) // batch_size) if num_batches is None else num_batches
        self._threads, self._prefetch_bytes = threads, prefetch_bytes

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        limits = (self._threads, self._prefetch_bytes)
        return _prepared(self._split, self._share, range(len(self)), self._batch_size, *limits)

    def _share(self, index: int) -> Share:
        return Share(self._shard[index * self._batch_size : (index + 1) * self._batch_size], None)


@dataclass(frozen=True, eq=False)
class Share:
    """Samples to read, and their random words; None: without augmentation."""

    samples: Array
    words: Array | None

    def split(self, count: int) -> list[tuple[slice, Share]]:
        """At most `count` equal parts, each with its place in the whole."""
        ends = np.linspace(0, len(self.samples), min(count, len(self.samples)) + 1).astype(int).tolist()
        places = [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
        return [
            (place, Share(self.samples[place], None if self.words is None else self.words[place])) for place in places
        ]


def _prepared(
    split: Samples, share: Callable[[int], Share], indices: range, batch_size: int, threads: int, prefetch_bytes: int
) -> Iterator[Batch]:
    """The batches of share(index), each of at most `batch_size` samples."""
    rooms = Rooms(lambda: split.room(batch_size))
    most = prefetch_bytes // (batch_size * split.room(1).nbytes)  # batches

    def start(pool: Executor, index: int) -> Callable[[], Batch]:
        whole = share(index)
        images, labels = rooms.take()[: len(whole.samples)], np.empty(len(whole.samples), np.int64)
        pieces = [
            pool.submit(_fill, split, piece, images[place], labels[place]) for place, piece in whole.split(threads)
        ]
        return partial(_filled, pieces, images, labels, index)

    return ahead(start, indices, threads, max(1, min(threads + 2, most)))


def _fill(split: Samples, share: Share, images: Array, labels: Array) -> None:
    if share.words is None:
        labels[:] = split.evaluation(share.samples, images)[1]
    else:
        labels[:] = split.training(share.samples, share.words, images)[1]


def _filled(pieces: Sequence[Future[None]], images: Array, labels: Array, index: int) -> Batch:
    """The batch without absent samples, once its pieces are done."""
    for piece in pieces:
        piece.result()
    present = labels != ABSENT
    return Batch(images, labels, index) if present.all() else Batch(images[present], labels[present], index)
