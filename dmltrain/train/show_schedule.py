"""--show-schedule: the learning rates of a run as text and as a picture, without training."""

from __future__ import annotations

from collections.abc import Iterator

from dmltrain.kvstore.base import KVStore
from dmltrain.logs import record
from dmltrain.optimizers.schedule import Schedule
from dmltrain.options import Options
from dmltrain.report import style
from dmltrain.train import loading
from dmltrain.train.plan import Plan, plan_of, schedule_of

BAR = 50  # characters of the highest rate
POINTS = 2000  # of the picture, at most


def show(options: Options, store: KVStore) -> None:
    """Worker 0 prints the rates of the run that these options, data and number of workers give, and draws the picture.
    Raises UserError."""
    log = record.logger(store.rank)
    dataset = loading.load_dataset(options, store, log.warning)
    plan = plan_of(options, loading.parts_of(options, dataset, store).steps, store.num_workers)
    if store.rank != 0:
        return
    schedule = schedule_of(options, plan)
    for line in lines(schedule, plan):
        print(line)
    if options.show_schedule:
        draw(schedule, plan, options.show_schedule)


def lines(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """For each epoch the rates of its first and last step, and a bar as long as the highest rate of the epoch."""
    epochs = [[schedule(epoch, step) for step in range(plan.steps_of(epoch))] for epoch in range(plan.epochs)]
    most = max((max(rates) for rates in epochs), default=0.0) or 1.0
    for epoch, rates in enumerate(epochs):
        bar = "#" * round(BAR * max(rates) / most)
        yield f"Epoch[{epoch}] Learning-rate={rates[0]:.6g} to {rates[-1]:.6g} {bar}".rstrip()


def draw(schedule: Schedule, plan: Plan, path: str) -> None:
    """Raises UserError without matplotlib, or if the file cannot be written."""
    steps = range(0, plan.iterations, max(1, plan.iterations // POINTS))
    figure, (axes,) = style.figure()
    rates = [schedule(*plan.position(step)) for step in steps]
    style.curve(axes, [step / plan.steps for step in steps], rates, 0, schedule.policy)
    style.finish(axes, "epoch", "learning rate")
    style.save(figure, path)
