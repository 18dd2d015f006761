"""--show-schedule: the learning rates of a run as text and as a picture, without training."""

from __future__ import annotations

from collections.abc import Iterator

from dmltrain.base.errors import UserError
from dmltrain.data.assignment.parts import Parts
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
    --num-examples takes the place of the data. Raises UserError."""
    parts = loading.planned_parts(options, store) or _parts_of_data(options, store)
    plan = plan_of(options, parts.steps, store.num_workers)
    if store.rank != 0:
        return
    schedule = schedule_of(options, plan)
    for line in lines(schedule, plan):
        print(line)
    if options.show_schedule:
        draw(schedule, plan, options.show_schedule)


def _parts_of_data(options: Options, store: KVStore) -> Parts:
    try:
        dataset = loading.load_dataset(options, store, record.logger(store.rank).warning)
        return loading.parts_of(options, dataset, store)
    except UserError as error:
        raise UserError(
            "--show-schedule needs the number of training images, because it decides how many steps an epoch has: give "
            f"--num-examples, which needs no data, or the data, which are not downloaded for this ({error})"
        ) from error


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
