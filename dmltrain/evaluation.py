"""The accuracy on a validation set, by all workers together."""

from __future__ import annotations

import numpy as np

from dmltrain.backends.backend import Trainer
from dmltrain.data import partition
from dmltrain.data.batches import EvalBatches
from dmltrain.data.dataset import Samples
from dmltrain.kvstore import KVStore
from dmltrain.metric import Sums


def evaluated(trainer: Trainer, samples: Samples, store: KVStore, batch_size: int, threads: int = 1) -> Sums:
    """The sums over all samples: each worker evaluates its part, all workers get the total."""
    shard = partition.validation_shard(len(samples), store.rank, store.num_workers)
    for batch in EvalBatches(samples, shard, batch_size, threads=threads):
        trainer.evaluate(batch.images, batch.labels)
    counted = trainer.take_sums()
    return Sums.of(store.all_reduce("validation", np.array(counted.values())))
