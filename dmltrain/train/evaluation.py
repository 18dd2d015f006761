"""The accuracy on a validation set, by all workers together."""

from __future__ import annotations

import numpy as np

from dmltrain.backends.backend import Trainer
from dmltrain.data.assignment import partition
from dmltrain.data.batches import PREFETCH_BYTES, EvalBatches
from dmltrain.data.dataset import Samples
from dmltrain.kvstore.base import KVStore
from dmltrain.logs.metric import Sums


def evaluate(
    trainer: Trainer,
    samples: Samples,
    store: KVStore,
    batch_size: int,
    threads: int = 1,
    prefetch_bytes: int = PREFETCH_BYTES,
    own: bool = False,
) -> tuple[Sums, Sums | None]:
    """The sums over all samples, of the network, and of the average of its weights if there is one. Workers evaluate
    their parts, and all get the total. own: each has its own samples; else all have the same, and divide them."""
    rank, workers = (0, 1) if own else (store.rank, store.num_workers)
    shard = partition.validation_shard(len(samples), rank, workers)
    for batch in EvalBatches(samples, shard, batch_size, threads=threads, prefetch_bytes=prefetch_bytes):
        trainer.evaluate(batch.images, batch.labels)
    counted, average = trainer.take_sums(), trainer.average.take_sums() if trainer.average else None
    if average is None:
        return Sums.of(store.all_reduce("validation", np.array(counted.values()))), None
    both = store.all_reduce("validation of both", np.array([counted.values(), average.values()]))
    return Sums.of(both[0]), Sums.of(both[1])
