"""Which worker sees which samples, and when. Pure functions; every worker computes the same answers on its own.

An epoch is one permutation of the training samples, the same on all workers. Worker r of n takes its positions
r, r + n, r + 2n, ...: nothing is repeated and nothing lost. Position p of the permutation is then in step
p // (n * batch) whatever n, so the union of the workers' batches of one step is exactly the batch that one process with
batch size n * batch would use: n workers train as one.

All workers do the same number of steps. Near the end of an epoch batches differ in size by what is left, down to 0.
"""

import numpy as np

from dmltrain import random_bits
from dmltrain.arrays import Array
from dmltrain.errors import UserError


def epoch_order(num_examples: int, seed: int, epoch: int) -> Array:
    """The permutation of the epoch, int64 (num_examples,): sample of each position."""
    # Sorting random words, rather than Generator.permutation: see random_bits.
    return np.argsort(random_bits.words(num_examples, seed, epoch, random_bits.ORDER), kind="stable")


def shard(order: Array, rank: int, num_workers: int) -> Array:
    """Worker `rank`'s part of the order: position rank + i * num_workers at i."""
    return order[rank::num_workers]


def validation_shard(num_examples: int, rank: int, num_workers: int) -> Array:
    """Worker `rank`'s part of the validation samples, unshuffled, int64; may be empty. Each sample is in one shard."""
    return np.arange(rank, num_examples, num_workers, dtype=np.int64)


def num_batches(num_examples: int, num_workers: int, batch_size: int) -> int:
    """Steps in an epoch, the same for every worker: those of the largest part."""
    largest = -(-num_examples // num_workers)
    return -(-largest // batch_size)


def step_sizes(num_examples: int, num_workers: int, batch_size: int, step: int) -> list[int]:
    """Samples of each worker in that step of an epoch, by rank; some may be 0 in the last step."""
    parts = (len(range(rank, num_examples, num_workers)) for rank in range(num_workers))
    return [max(0, min(part - step * batch_size, batch_size)) for part in parts]


def check(num_examples: int, num_workers: int, batch_size: int) -> None:
    """UserError unless every worker's part of the training samples holds at least one batch."""
    if batch_size < 1:
        raise UserError(f"--batch-size is {batch_size}: expected 1 or more")
    smallest = num_examples // num_workers
    if batch_size > smallest:
        raise UserError(
            f"--batch-size {batch_size} (per worker) is larger than a worker's part of the data: {num_examples} "
            f"training examples over {num_workers} worker(s) leave {smallest} each; "
            "use a smaller --batch-size, fewer workers or more examples"
        )
