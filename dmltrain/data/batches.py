"""The batches of one epoch, prepared in advance by background threads.

numpy releases the interpreter lock, so the consumer computes while threads prepare the next batches; at most
`threads + 2` are ready. The consumer gets the threads' exceptions. If it stops early, by `break` or an exception, the
threads end after their current batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from dmltrain.arrays import Array
from dmltrain.data import augment
from dmltrain.data.dataset import Samples


@dataclass(frozen=True, eq=False)
class Batch:
    """images uint8 (n, C, H, W) in any order of memory; labels int64 (n,); index: of the batch in the epoch."""

    images: Array
    labels: Array
    index: int


class TrainBatches:
    """One epoch of a worker's training batches: augmented samples in the order of its shard.

    order_shard: `partition.shard(epoch_order(...), rank, num_workers)`. There are always `num_batches`; at the end of
    the shard they are smaller, down to (0, C, H, W).
    """

    def __init__(
        self,
        split: Samples,
        order_shard: Array,
        batch_size: int,
        num_batches: int,
        seed: int,
        epoch: int,
        rank: int,
        num_workers: int,
        threads: int = 1,
    ) -> None:
        self._split, self._shard = split, order_shard
        self._batch_size, self._num_batches, self._threads = batch_size, num_batches, threads
        self._rank, self._num_workers = rank, num_workers
        self._words = augment.words(len(split), seed, epoch)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        return ahead(self._batch, self._num_batches, self._threads)

    def _batch(self, index: int) -> Batch:
        start = index * self._batch_size  # in the shard
        samples = self._shard[start : start + self._batch_size]
        first = self._rank + start * self._num_workers  # in the epoch's permutation
        positions = slice(first, first + len(samples) * self._num_workers, self._num_workers)
        return Batch(*self._split.training(samples, self._words[positions]), index)


class EvalBatches:
    """A worker's validation batches in the order of its shard, without augmentation; the last may be smaller.

    shard: `partition.validation_shard(...)`; num_batches: None for as many as the shard needs.
    """

    def __init__(
        self, split: Samples, shard: Array, batch_size: int, num_batches: int | None = None, threads: int = 1
    ) -> None:
        self._split, self._shard, self._batch_size = split, shard, batch_size
        self._num_batches = -(-len(shard) // batch_size) if num_batches is None else num_batches
        self._threads = threads

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        return ahead(self._batch, self._num_batches, self._threads)

    def _batch(self, index: int) -> Batch:
        samples = self._shard[index * self._batch_size : (index + 1) * self._batch_size]
        return Batch(*self._split.evaluation(samples), index)


def ahead(make: Callable[[int], Batch], count: int, threads: int) -> Iterator[Batch]:
    """make(0), make(1), ... make(count - 1), in order, computed in advance by `threads` threads."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="dmltrain-batches")
    waiting: deque[Future[Batch]] = deque()
    try:
        for index in range(count):
            waiting.append(pool.submit(make, index))
            if len(waiting) > threads + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
