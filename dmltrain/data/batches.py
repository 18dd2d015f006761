"""The batches of one epoch, prepared in advance by background threads.

numpy and the image libraries release the interpreter lock, so the consumer computes while threads prepare the next
batches. All threads share the work on the first batch that is not ready. At most `threads + 2` batches are ready, and
no more than fit into `prefetch_bytes`. The consumer gets the threads' exceptions. If it stops early, by `break` or an
exception, the threads end after their current share of a batch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.ahead import ahead
from dmltrain.data.assignment.parts import Part
from dmltrain.data.dataset import ABSENT, Samples

PREFETCH_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Batch:
    """images: uint8 (n, C, H, W) in any order of memory. labels: int64 (n,). index: its number in the epoch."""

    images: Array
    labels: Array
    index: int


class TrainBatches:
    """One epoch of a worker's training batches: augmented samples in the order of its part.

    It always has `part.steps` batches; the last ones may be smaller, down to (0, C, H, W).
    """

    def __init__(self, split: Samples, part: Part, threads: int = 1, prefetch_bytes: int = PREFETCH_BYTES) -> None:
        self._split, self._part, self._threads, self._prefetch_bytes = split, part, threads, prefetch_bytes
        self._indices = range(part.steps)

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
    """The samples of a batch, or of a part of it, int64 (n,), and their random words, uint64 (n,). words None: the
    samples are not augmented."""

    samples: Array
    words: Array | None

    def split(self, count: int) -> list[tuple[slice, Share]]:
        """At most `count` parts of equal size, each with its slice of the whole."""
        ends = np.linspace(0, len(self.samples), min(count, len(self.samples)) + 1).astype(int).tolist()
        places = [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
        return [
            (place, Share(self.samples[place], None if self.words is None else self.words[place])) for place in places
        ]


def _prepared(
    split: Samples, share: Callable[[int], Share], indices: range, batch_size: int, threads: int, prefetch_bytes: int
) -> Iterator[Batch]:
    """The batches of share(index), each of at most `batch_size` samples."""
    arrays = ArrayPool(lambda: split.new_images(batch_size))
    most = prefetch_bytes // (batch_size * split.new_images(1).nbytes)  # batches

    def start(pool: Executor, index: int) -> Callable[[], Batch]:
        whole = share(index)
        images, labels = arrays.take()[: len(whole.samples)], np.empty(len(whole.samples), np.int64)
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


class ArrayPool:
    """Arrays for batches of images, used again as soon as nothing refers to them. For one thread.

    A batch of 128 images of 224x224 pixels has 19 MB. The kernel would clear and map fresh memory for each batch page
    by page. An array is free when neither a batch, nor a view of it, nor a framework's tensor that shares its memory
    refers to it. So a consumer may keep a batch as long as it likes; the next batch then gets a new array.
    `make()` returns a new array, or a view of one; all have the same shape.
    """

    def __init__(self, make: Callable[[], Array]) -> None:
        self._make = make
        # A view of each array, and the number of references to its memory while the array is free.
        self._arrays: list[tuple[Array, int]] = []

    def take(self) -> Array:
        """A free array, or a new one if there is none."""
        for view, free in self._arrays:
            if _references(view) == free:
                return view[:]  # not `view`: a new view adds a reference, which shows that the array is in use
        view = self._make()[:]  # [:], so that it has a base also if `make` returns an array that owns its memory
        self._arrays.append((view, _references(view)))
        return view[:]

    def __len__(self) -> int:
        """The number of arrays, in use or free."""
        return len(self._arrays)


def _references(view: Array) -> int:
    """The number of references to the array that owns the memory: each view of it holds one."""
    return sys.getrefcount(view.base)


class ReadAhead:
    """Reads a chunk-shuffled part of an epoch from the disk in the order of the files, ahead of the decoding threads.

    Samples of a window of `--shuffle chunk` lie in a few places of the disk, but come in random order. So a thread
    reads the next window's records from the first to the last and drops them. The operating system keeps what was read,
    and the decoding threads find it in memory: without seeks, with one more copy of each record.
    Without `touch` of the split, and without windows, it does nothing.
    """

    def __init__(self, split: Samples, part: Part) -> None:
        self._touch = getattr(split, "touch", None) if part.window else None
        self._part, self._next = part, 0  # the first window that nobody has asked to read
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dmltrain-batches-disk")

    def reach(self, position: int) -> None:
        """Read the window of this position of the part, and the next one: work on it begins."""
        window = self._part.window
        if self._touch is None:
            return
        self._next = max(self._next, position // window)
        while self._next <= position // window + 1 and self._next * window < len(self._part.order):
            self._pool.submit(self._read, self._next * window)
            self._next += 1

    def _read(self, start: int) -> None:
        for sample in np.sort(self._part.order[start : start + self._part.window]).tolist():
            if self._stopped.is_set():
                return
            assert self._touch is not None
            self._touch(sample)

    def close(self) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
