"""--test-io 1: reads the training data of one epoch without training, and logs how fast."""

from __future__ import annotations

import time

from dmltrain.data.batches import TrainBatches
from dmltrain.kvstore.base import KVStore
from dmltrain.logs import record
from dmltrain.options import Options
from dmltrain.train import loading


def report(options: Options, store: KVStore) -> None:
    """As MXNet's fit.py logs it, and the mean of the whole epoch at the end. Raises UserError."""
    log = record.logger(store.rank)
    dataset = loading.load_dataset(options, store, log.warning)
    part = loading.parts_of(options, dataset, store).part(store.rank, options.seed, 0)
    threads = loading.threads(options, dataset)
    began = since = time.perf_counter()
    recent = total = 0
    for batch in TrainBatches(dataset.train, part, threads, options.prefetch_bytes):
        recent += len(batch.labels)
        total += len(batch.labels)
        if (batch.index + 1) % options.disp_batches == 0:
            now = time.perf_counter()
            log.info("Batch [%d]\tSpeed: %.2f samples/sec", batch.index, recent / (now - since))
            recent, since = 0, now
    seconds = time.perf_counter() - began
    log.info("Read %d samples in %.1f s: %.2f samples/sec, %d threads", total, seconds, total / seconds, threads)
