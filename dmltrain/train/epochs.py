"""An epoch of a run: its steps, what happens between them and after the last, and the log lines of both.

A snapshot or a test in the middle of an epoch first makes weights and statistics the same on all workers, as the end of
an epoch does. After a snapshot the frameworks' random numbers are seeded anew from its position. So a run that resumes
from a snapshot makes the same steps as the run that wrote it, bit for bit.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from dmltrain.data.batches import TrainBatches
from dmltrain.logs import record
from dmltrain.logs.metric import Sums
from dmltrain.train import divergence, elastic, epoch_cost, evaluation, resume
from dmltrain.train.epoch_cost import Cost
from dmltrain.train.meter import Meter
from dmltrain.train.plan import Position
from dmltrain.train.run import Run


def train(run: Run, epoch: int) -> Cost:
    """Train on each sample of this worker's part once, or up to the run's last step. Afterwards all workers have the
    same weights and statistics."""
    trainer, store = run.trainer, run.store
    first = run.start.step if epoch == run.start.epoch else 0
    sent, received = store.bytes_sent, store.bytes_received
    seed(run, Position(epoch, first))
    start = epoch_cost.mark(store)
    run.usage.begin()
    meter = Meter(run, epoch)
    rate = elastic.steps(run, epoch, first, meter) if store.elastic else steps(run, epoch, first, meter)
    trainer.synchronize()
    store.repeat(store.barrier)  # the epoch lasts until the last worker has made its steps, also asynchronous ones
    seconds = meter.finish()
    run.log_values(epoch, {f"Train-{name}": value for name, value in run.metrics(meter.whole).items()})
    run.log_values(epoch, {"Time cost": seconds})
    settle(run)
    used, end = run.usage.end(), epoch_cost.mark(store)
    spent = epoch_cost.spent_between(store, start, end) if start and end else {}
    return Cost(meter.whole.samples / seconds, rate, sent, received, spent, used)


def seed(run: Run, position: Position) -> None:
    """Seed the framework's random numbers, so that a run that resumes at `position` draws the same ones."""
    run.trainer.seed(run.options.seed, position.epoch, run.store.member, *([position.step] if position.step else []))


def settle(run: Run) -> None:
    """Give all workers the same weights and statistics."""
    store, trainer = run.store, run.trainer
    trainer.synchronize()
    # Asynchronous workers arrive one by one. After the barrier no worker pushes any more, so the second synchronize()
    # gives the same weights to all.
    store.repeat(store.barrier)
    trainer.synchronize()
    store.repeat(lambda: trainer.merge_statistics(store.all_reduce, store.num_workers))


def steps(run: Run, epoch: int, first: int, meter: Meter) -> float:
    """Make the epoch's steps from number `first` on. Returns the last learning rate."""
    options, trainer, plan, rate = run.options, run.trainer, run.plan, 0.0
    for batch in training_batches(run, epoch, first):
        step = batch.index // plan.group
        if run.pace and batch.index % plan.group == 0:
            run.pace.step(plan.iteration(Position(epoch, step)), len(plan.batches_of(step)), own_samples(run, step))
        complete = (batch.index + 1) % plan.group == 0 or batch.index + 1 == plan.batches
        if complete:
            rate = run.schedule(epoch, step)
            trainer.train_step(batch.images, batch.labels, step_total(run, step), rate)
        else:
            trainer.accumulate(batch.images, batch.labels, step_total(run, step))
        if batch.index and batch.index % options.disp_batches == 0:
            meter.show(batch.index)
        if complete:
            between_steps(run, Position(epoch, step + 1), meter)
    return rate


def between_steps(run: Run, position: Position, meter: Meter) -> None:
    """Make the snapshot and the test that are due after this step. After the last step of an epoch `save` and
    `validate` do it."""
    options, iteration = run.options, run.plan.iteration(position)
    if due(options.monitor, iteration):
        log_sizes(run, iteration)
    if position.step == run.plan.steps_of(position.epoch):
        return
    signalled = run.snapshot_signal.comes()
    if signalled:
        run.log.info("A worker got SIGUSR1: all make a snapshot after iteration %d", iteration)
    snapshot, test = signalled or due(options.snapshot, iteration), due(options.test_interval, iteration)
    if not (snapshot or test):
        return
    with meter.pause():
        settle(run)
        if snapshot:
            divergence.check(run, position.epoch)
            resume.save(run, position)
            seed(run, position)
        if test:
            log_validation(run, iteration, evaluate(run))


def log_sizes(run: Run, iteration: int) -> None:
    """--monitor: log the sizes of the network's arrays after this step, in the network's order, as MXNet's Monitor
    prints them (python/mxnet/monitor.py): each one's norm divided by the root of its number of elements."""
    run.trainer.settle()
    arrays = {common_array.name: common_array.read for common_array in run.trainer.common_arrays()}
    for parameter in (*run.network.parameters(), *run.network.auxiliary()):
        array = arrays[parameter.name]()
        size = float(np.linalg.norm(array.astype(np.float64).ravel())) / sqrt(array.size)
        run.log.info(record.array_size(iteration, parameter.name, size))


def due(interval: int, iteration: int) -> bool:
    return interval > 0 and iteration % interval == 0


def training_batches(run: Run, epoch: int, first: int) -> TrainBatches:
    """The batches of the run's steps in this epoch, from step `first` on."""
    plan, part = run.plan, run.parts.part(run.store.rank, run.options.seed, epoch)
    return TrainBatches(
        run.dataset.train,
        part,
        run.threads,
        run.options.prefetch_bytes,
        first=first * plan.group,
        stop=plan.steps_of(epoch) * plan.group,
    )


def step_total(run: Run, step: int) -> int:
    """Number of samples in a step's mean gradient: all workers' if they step together, else this worker's."""
    if run.store.kvstore_type.steps_together:
        return sum(sum(run.parts.step_sizes(batch)) for batch in run.plan.batches_of(step))
    return max(1, own_samples(run, step))


def own_samples(run: Run, step: int) -> int:
    """Number of this worker's samples in a step."""
    return sum(run.parts.step_sizes(batch)[run.store.rank] for batch in run.plan.batches_of(step))


def save(run: Run, epoch: int) -> None:
    """Write a checkpoint after this epoch if the options ask for it, or if it is the last."""
    options, position = run.options, run.plan.after(epoch, run.plan.steps_of(epoch))
    last = epoch + 1 == run.plan.epochs
    if last or (epoch + 1) % options.save_period == 0 or due(options.snapshot, run.plan.iteration(position)):
        run.store.repeat(lambda: write(run, position))


def write(run: Run, position: Position) -> None:
    """Write a checkpoint. If worker 0 of an elastic job is lost before all workers know that the file is there, the
    worker that takes its place writes the file again."""
    resume.save(run, position)
    if run.store.elastic:
        run.store.barrier()


def validate(run: Run, epoch: int) -> None:
    """Log the accuracy on the whole validation set after this epoch."""
    sums = evaluate(run)
    if not sums.samples:
        return
    run.log_values(epoch, {f"Validation-{name}": value for name, value in run.metrics(sums).items()})
    iteration = run.plan.iteration(run.plan.after(epoch, run.plan.steps_of(epoch)))
    if due(run.options.test_interval, iteration):
        log_validation(run, iteration, sums)


def evaluate(run: Run) -> Sums:
    """The sums over the whole validation set."""
    options = run.options
    return run.store.repeat(
        lambda: evaluation.evaluate(
            run.trainer,
            run.dataset.validation,
            run.store,
            options.batch_size,
            run.threads,
            options.prefetch_bytes,
            run.own_validation,
        )
    )


def log_validation(run: Run, iteration: int, sums: Sums) -> None:
    if not sums.samples:
        return  # there are no validation data
    values = {f"Validation-{name}": value for name, value in run.metrics(sums).items()}
    for name, value in values.items():
        run.log.info(record.step_value(iteration, name, value))
    run.board.test(iteration, values)
