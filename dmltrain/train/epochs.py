"""An epoch of a run: what happens between its steps and after the last, and the log lines of both.

A snapshot or a test in the middle of an epoch first makes weights and statistics the same on all workers, as the end of
an epoch does. After a snapshot the frameworks' random numbers are seeded anew from its position. So a run that resumes
from a snapshot makes the same steps as the run that wrote it, bit for bit.
"""

from __future__ import annotations

from functools import partial

from dmltrain.logs import record
from dmltrain.logs.metric import Sums
from dmltrain.train import divergence, epoch_cost, evaluation, resume
from dmltrain.train.epoch_cost import Cost
from dmltrain.train.meter import Meter
from dmltrain.train.plan import Position
from dmltrain.train.run import Run
from dmltrain.train.steps import Steps


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
    steps = Steps(run, epoch, first, meter)
    for step, signalled in steps.stops():
        between_steps(run, Position(epoch, step), signalled, meter)
    trainer.synchronize()
    store.repeat(store.barrier)  # the epoch lasts until the last worker has made its steps, also asynchronous ones
    seconds = meter.finish()
    run.log_values(epoch, {f"Train-{name}": value for name, value in run.metrics(meter.whole).items()})
    run.log_values(epoch, {"Time cost": seconds})
    settle(run)
    if trainer.average and not run.plan.after(epoch, run.plan.steps_of(epoch)).step:
        trainer.average.end_epoch(epoch + 1)
    used, end = run.usage.end(), epoch_cost.mark(store)
    spent = epoch_cost.spent_between(store, start, end) if start and end else {}
    return Cost(meter.whole.samples / seconds, steps.rate, sent, received, spent, used)


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


def between_steps(run: Run, position: Position, signalled: bool, meter: Meter) -> None:
    """Make the snapshot and the test that are due in the middle of an epoch. At its end `save` and `validate` do it."""
    options, iteration = run.options, run.plan.iteration(position)
    if not (signalled or due(options.snapshot, iteration) or due(options.test_interval, iteration)):
        return
    if signalled:
        run.log.info("A worker got SIGUSR1: all make a snapshot after iteration %d", iteration)
    with meter.pause():
        settle(run)
        if signalled or due(options.snapshot, iteration):
            run.store.repeat(partial(divergence.check, run, position.epoch))
            run.store.repeat(partial(resume.save, run, position))
            seed(run, position)
        if due(options.test_interval, iteration):
            log_validation(run, iteration, evaluate(run)[0])


def due(interval: int, iteration: int) -> bool:
    return interval > 0 and iteration % interval == 0


def save(run: Run, epoch: int) -> None:
    """Write a checkpoint after this epoch if the options ask for it, or if it is the last."""
    options, position = run.options, run.plan.after(epoch, run.plan.steps_of(epoch))
    last = epoch + 1 == run.plan.epochs
    if last or (epoch + 1) % options.save_period == 0 or due(options.snapshot, run.plan.iteration(position)):
        run.store.repeat(partial(resume.save, run, position))


def validate(run: Run, epoch: int) -> None:
    """Log the accuracy on the whole validation set after this epoch."""
    sums, average = evaluate(run)
    if not sums.samples:
        return
    run.log_values(epoch, {f"Validation-{name}": value for name, value in run.metrics(sums).items()})
    if average:
        run.log_values(epoch, {f"Validation-average-{name}": value for name, value in run.metrics(average).items()})
    iteration = run.plan.iteration(run.plan.after(epoch, run.plan.steps_of(epoch)))
    if due(run.options.test_interval, iteration):
        log_validation(run, iteration, sums)


def evaluate(run: Run) -> tuple[Sums, Sums | None]:
    """The sums over the whole validation set, of the network and of the average of its weights."""
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
