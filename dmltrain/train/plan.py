"""How a run is divided into epochs, steps and batches, and its learning rates. Pure.

A step (an iteration) is one update of the weights. It has one batch of each worker, or with --macrobatch-size several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dmltrain.backends.backend import batches_of_a_step
from dmltrain.checkpoints.checkpoint import Saved
from dmltrain.optimizers import schedule
from dmltrain.optimizers.schedule import Schedule
from dmltrain.options import Options

LARGE_BATCH = "lbsgd"  # MXNet's optimizer for large batches
ONE_CYCLE = "onecycle"  # the policy whose first and last rates follow from --lr


class Position(NamedTuple):
    """How far a run is: whole epochs, and steps of the next one. Positions are ordered."""

    epoch: int
    step: int = 0


@dataclass(frozen=True)
class Plan:
    """batches: of each worker in an epoch. group: batches of a worker in a step. iterations: steps of the whole run."""

    batches: int
    group: int = 1
    iterations: int = 0

    @property
    def steps(self) -> int:
        """Number of steps in an epoch. The last step may have fewer batches than others."""
        return -(-self.batches // self.group)

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run. The last epoch may end early."""
        return -(-self.iterations // self.steps)

    def steps_of(self, epoch: int) -> int:
        """The steps that the run makes in this epoch."""
        return min(self.steps, self.iterations - epoch * self.steps)

    def batches_of(self, step: int) -> range:
        """The numbers of the batches of a step of an epoch."""
        return range(step * self.group, min(self.batches, (step + 1) * self.group))

    def after(self, epoch: int, steps: int) -> Position:
        """The position after so many steps of `epoch`."""
        return Position(epoch + 1) if steps == self.steps else Position(epoch, steps)

    def iteration(self, position: Position) -> int:
        """How many steps the run makes until `position`."""
        return position.epoch * self.steps + position.step

    def position(self, iteration: int) -> Position:
        return Position(*divmod(iteration, self.steps))

    def saved(self, position: Position) -> Saved:
        """What the name of a checkpoint at this position says."""
        return Saved(position.epoch, self.iteration(position) if position.step else 0)


def plan_of(options: Options, batches: int, num_workers: int) -> Plan:
    """The plan of a run whose workers have `batches` in an epoch. As in MXNet's fit.py, --macrobatch-size is rounded up
    to whole batches of all workers."""
    group = batches_of_a_step(options, num_workers)
    steps = Plan(batches, group).steps
    return Plan(batches, group, options.max_iter or options.num_epochs * steps)


def schedule_of(options: Options, plan: Plan) -> Schedule:
    """With lbsgd the rate of a step of n batches is n times --lr, which the warm-up approaches from --lr."""
    large = options.optimizer == LARGE_BATCH
    lars = options.warmup_strategy == schedule.LARS
    warmup, name = schedule.LARGE_BATCH_WARMUP if large else 0.0, options.lr_policy or schedule.POLICY
    first, floor = options.warmup_lr, options.min_lr or 0.0
    if name == ONE_CYCLE:
        first = options.lr / schedule.RISE if first is None else first
        floor = first / schedule.FALL if options.min_lr is None else floor
    return Schedule(
        base=options.lr,
        batches=plan.steps,
        factor=schedule.FACTOR if options.lr_factor is None else options.lr_factor,
        step_epochs=options.lr_step_epochs,
        warmup_epochs=0.0 if lars else warmup if options.warmup_epochs is None else options.warmup_epochs,
        warmup="linear" if lars else options.warmup_strategy,
        policy=name,
        step_iterations=options.lr_step_iterations,
        power=options.lr_power or 0.0,
        by=options.lr_by,
        total=max(1, plan.iterations),
        low=1.0 if large else 0.0,
        high=float(plan.group) if large and not lars else 1.0,
        floor=floor,
        first=first,
        prefix=options.warmup_prefix,
        cycle_epochs=options.lr_restart_epochs or 0,
        cycle_factor=options.lr_restart_factor,
        peak=schedule.PEAK if options.lr_peak is None else options.lr_peak,
    )
