"""Which worker sees which samples in which step. Pure functions, which return the same on every worker.

An epoch is a permutation of the training samples, the same on all workers. Worker r of n has positions r, r + n,
r + 2n, ...: no sample is repeated or skipped. Position p is in step p // (n * batch) for every n. So the union of the
workers' batches of a step is exactly the batch of one process with batch size n * batch: n workers train like one.

All workers make the same number of steps. At the end of an epoch batches are smaller, down to 0 samples.
"""

import numpy as np

from dmltrain import random_bits
from dmltrain.arrays import Array
from dmltrain.errors import UserError


def epoch_order(num_examples: int, seed: int, epoch: int) -> Array:
    """The permutation of the epoch, int64 (num_examples,): the sample at each position."""
    # Not by Generator.permutation: see random_bits.py.
    return np.argsort(random_bits.words(num_examples, seed, epoch, random_bits.ORDER), kind="stable")


def shard(order: Array, rank: int, num_workers: int) -> Array:
    """Worker `rank`'s part of the order: position rank + i * num_workers at i."""
    return order[rank::num_workers]


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
