"""Which worker sees which samples in which step. Pure functions, which return the same on every worker.

An epoch is a permutation of the training samples, the same on all workers. Worker r of n has positions r, r + n,
r + 2n, ...: no sample is repeated or skipped. Position p is in step p // (n * batch) for every n. So the union of the
workers' batches of a step is exactly the batch of one process with batch size n * batch: n workers train like one.

All workers make the same number of steps. At the end of an epoch batches are smaller, down to 0 samples. parts.py has
the parts of an epoch that follow from this, and those of workers with files of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

# --shuffle chunk: at 110 KB an image, a chunk is 28 MB, which a disk reads in twenty times the time of a seek.
CHUNK = 256  # consecutive records
WINDOW = 8 * CHUNK  # records that are shuffled together
PIECE = 1 << 20  # words that `argsort` changes at once


def epoch_order(num_examples: int, seed: int, epoch: int, first: int = 0) -> Array:
    """The permutation of the epoch, int64 (num_examples,): the sample at each position. `first`: the first random word
    of the epoch's stream that is used; workers that permute samples of their own use different words."""
    # Not by Generator.permutation: see random_bits.py.
    return _permutation(num_examples, seed, epoch, random_bits.ORDER, first)


def chunk_order(num_examples: int, seed: int, epoch: int, first: int = 0) -> Array:
    """A permutation for disks with slow seeks: chunks of consecutive samples in random order, and the samples of each
    window of some chunks shuffled. So the samples of a window lie in a few places of the disk."""
    chunks = _permutation(-(-num_examples // CHUNK), seed, epoch, random_bits.CHUNKS, first)
    order, filled = np.empty(num_examples, np.int64), 0
    for start in (chunks * CHUNK).tolist():
        stop = min(start + CHUNK, num_examples)  # the last chunk may be smaller
        order[filled : filled + stop - start] = np.arange(start, stop)
        filled += stop - start
    for start in range(0, num_examples, WINDOW):
        window = order[start : start + WINDOW]
        words = random_bits.words_from(first + start, len(window), seed, epoch, random_bits.ORDER)
        window[:] = window[np.argsort(words, kind="stable")]
    return order


def _permutation(count: int, seed: int, epoch: int, purpose: int, first: int) -> Array:
    """The permutation of 0 to count - 1 by the random words `first` to `first` + count - 1 of the stream."""

    def word(index: int) -> int:
        return int(random_bits.words_from(first + index, 1, seed, epoch, purpose)[0])

    return argsort(random_bits.words_from(first, count, seed, epoch, purpose), word)


def argsort(words: Array, word: Callable[[int], int]) -> Array:
    """np.argsort(words, kind="stable"), int64, in the memory of `words` (uint64). `word(index)` gives a word again.

    np.argsort needs two more arrays of that size: with 14 million samples, 112 MB each. Here the low bits of each word
    make room for its index, the words are sorted in place, and the indices remain. Words that differ in the low bits
    only, about 90 pairs among 14 million, are then put in order by their original values.
    """
    bits = np.uint64(max(1, (len(words) - 1).bit_length()))
    low = np.uint64((1 << int(bits)) - 1)
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        piece &= ~low
        piece |= np.arange(start, start + len(piece), dtype=np.uint64)
    words.sort()
    equal = _equal(words, bits)
    words &= low
    order = words.view(np.int64)
    for start, stop in _runs(equal):
        order[start:stop] = sorted(order[start:stop].tolist(), key=lambda index: (word(index), index))
    return order


def _equal(words: Array, bits: np.uint64) -> Array:
    """The indices of words whose high bits equal those of the next word."""
    equal = [np.empty(0, np.int64)]
    for start in range(0, len(words) - 1, PIECE):
        high = words[start : start + PIECE + 1] >> bits
        equal.append(np.flatnonzero(high[1:] == high[:-1]) + start)
    return np.concatenate(equal)


def _runs(equal: Array) -> list[tuple[int, int]]:
    """Start and end of each run of words with the same high bits."""
    breaks = np.flatnonzero(np.diff(equal) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 2) for run in np.split(equal, breaks) if len(run)]


SHUFFLES = {"global": epoch_order, "chunk": chunk_order}


def validation_shard(num_examples: int, rank: int, num_workers: int) -> Array:
    """Worker `rank`'s part of the validation samples, in order, int64; may be empty. Each sample is in one part."""
    return np.arange(rank, num_examples, num_workers, dtype=np.int64)


def num_batches(num_examples: int, num_workers: int, batch_size: int) -> int:
    """Steps in an epoch, the same on every worker: those that the largest part needs."""
    largest = -(-num_examples // num_workers)
    return -(-largest // batch_size)


def step_sizes(num_examples: int, num_workers: int, batch_size: int, step: int) -> list[int]:
    """Samples of each worker in that step of an epoch, by rank; some may be 0 in the last step."""
    parts = (len(range(rank, num_examples, num_workers)) for rank in range(num_workers))
    return [max(0, min(part - step * batch_size, batch_size)) for part in parts]


def check(num_examples: int, num_workers: int, batch_size: int) -> None:
    """Raise UserError unless every worker's part of the training samples has at least one batch."""
    if batch_size < 1:
        raise UserError(f"--batch-size is {batch_size}: expected 1 or more")
    smallest = num_examples // num_workers
    if batch_size > smallest:
        raise UserError(
            f"--batch-size {batch_size} (per worker) is larger than a worker's part of the data: {num_examples} "
            f"training examples over {num_workers} worker(s) leave {smallest} each; "
            "use a smaller --batch-size, fewer workers or more examples"
        )
