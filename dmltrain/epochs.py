"""An epoch of a run: its steps, the validation after it, and the log lines of both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dmltrain import communication, record
from dmltrain.data import partition
from dmltrain.data.batches import EvalBatches, TrainBatches
from dmltrain.metric import Sums
from dmltrain.run import Run


@dataclass(frozen=True)
class Cost:
    """What an epoch of training cost."""

    speed: float  # samples per second, of this worker
    learning_rate: float  # of its last step
    sent_before: int  # bytes, until the epoch's start
    received_before: int
    spent: Mapping[str, float]  # see communication.between; empty for stores without counters


def train(run: Run, epoch: int) -> Cost:
    """Train on each sample of this worker's part once. After it all workers have the same weights and statistics."""
    options, trainer, store = run.options, run.trainer, run.store
    sent, received = store.bytes_sent, store.bytes_received
    trainer.seed(options.seed, epoch, store.rank)
    start = communication.mark(store)
    started = time.perf_counter()
    whole, rate = steps(run, epoch)
    trainer.synchronize()
    whole += trainer.take_sums()
    seconds = time.perf_counter() - started
    run.log_values(epoch, {f"Train-{name}": value for name, value in whole.metrics(options.top_k).items()})
    run.log_values(epoch, {"Time cost": seconds})
    store.barrier()  # asynchronous workers arrive one by one; the weights do not change after the last
    trainer.synchronize()
    trainer.merge_statistics(store.all_reduce, store.num_workers)
    end = communication.mark(store)
    spent = communication.between(store, start, end) if start and end else {}
    return Cost(whole.samples / seconds, rate, sent, received, spent)


def steps(run: Run, epoch: int) -> tuple[Sums, float]:
    """Make the epoch's steps. Returns the sums of all logged batches, and the last learning rate."""
    options, trainer, rate = run.options, run.trainer, 0.0
    whole, since = Sums(), time.perf_counter()
    for batch in training_batches(run, epoch):
        rate = run.schedule(epoch, batch.index)
        trainer.train_step(batch.images, batch.labels, step_total(run, batch.index), rate)
        if batch.index and batch.index % options.disp_batches == 0:
            recent, now = trainer.take_sums(), time.perf_counter()
            speed = recent.samples / (now - since)
            run.log.info(record.batch(epoch, batch.index, speed, recent.metrics(options.top_k)))
            whole, since = whole + recent, now
    return whole, rate


def training_batches(run: Run, epoch: int) -> TrainBatches:
    options, split, store = run.options, run.dataset.train, run.store
    order = partition.epoch_order(len(split), options.seed, epoch)
    return TrainBatches(
        split,
        partition.shard(order, store.rank, store.num_workers),
        options.batch_size,
        run.batches,
        options.seed,
        epoch,
        store.rank,
        store.num_workers,
        options.data_nthreads,
    )


def step_total(run: Run, step: int) -> int:
    """Number of samples in a step's mean gradient: of all workers if they step together, else of this worker."""
    sizes = partition.step_sizes(len(run.dataset.train), run.store.num_workers, run.options.batch_size, step)
    return sum(sizes) if run.store.kvstore_type.synchronous else max(1, sizes[run.store.rank])


def validate(run: Run, epoch: int) -> None:
    """Log the accuracy on the whole validation set: each worker evaluates its part, all workers log the total."""
    dataset, store = run.dataset, run.store
    shard = partition.validation_shard(len(dataset.validation), store.rank, store.num_workers)
    for batch in EvalBatches(dataset.validation, shard, run.options.batch_size):
        run.trainer.evaluate(batch.images, batch.labels)
    counted = run.trainer.take_sums()
    whole = Sums.of(store.all_reduce("validation", np.array(counted.values())))
    run.log_values(epoch, {f"Validation-{name}": value for name, value in whole.metrics(run.options.top_k).items()})


def report(run: Run, epoch: int, cost: Cost) -> None:
    """Log what the epoch cost. Bytes include those of validation."""
    from dmltrain import hardware

    store, memory = run.store, run.trainer.device_memory()
    staleness = None if store.kvstore_type.synchronous else store.take_staleness()  # MXNet does not count it
    run.log_values(
        epoch,
        {
            "Speed": cost.speed,
            "Memory": hardware.peak_memory(),
            **({} if memory is None else {"Device-Memory": memory}),
            "Sent": store.bytes_sent - cost.sent_before,
            "Received": store.bytes_received - cost.received_before,
            "Learning-rate": cost.learning_rate,
            **({} if staleness is None else {"Staleness": staleness}),
        },
    )
    if cost.spent:
        run.log.info(record.communication(epoch, cost.spent))
