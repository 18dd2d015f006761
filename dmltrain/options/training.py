"""The options of the group Training."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import optimizers
from dmltrain.layers import INITIALISERS
from dmltrain.optimizers import schedule
from dmltrain.options.field import option
from dmltrain.options.values import integer, integers, number, one_of, step_epochs

CONSTANT, SCALED = "constant", "per-worker-scaled-lr"
BATCHES = (CONSTANT, "per-worker", SCALED)


@dataclass(frozen=True)
class TrainingOptions:
    """See `Options`."""

    batch_size: int = option(
        "Training", "samples per worker in a batch; a worker's devices share them", integer(1), 128
    )
    batch: str = option(
        "Training",
        "elastic jobs, when the number of workers changes: constant: a step has as many samples as at the start; "
        "per-worker: a step has --batch-size samples of each worker, and the learning rate stays; "
        "per-worker-scaled-lr: the same, but the learning rate changes in proportion to the samples of a step",
        one_of("kind of batch", BATCHES),
        CONSTANT,
    )
    num_epochs: int = option("Training", "number of epochs in total, counted from the very first", integer(0), 100)
    max_iter: int | None = option(
        "Training", "number of iterations (steps) in total, instead of --num-epochs", integer(1)
    )
    initializer: str = option(
        "Training",
        "first values of the weights: " + ", ".join(INITIALISERS) + "; default: the network's own",
        one_of("initializer", INITIALISERS),
        "default",
    )
    optimizer: str = option(
        "Training",
        "the optimizer: " + ", ".join(optimizers.NAMES),
        one_of("optimizer", optimizers.NAMES),
        "sgd",
    )
    lr: float = option("Training", "learning rate", number(0.0), 0.1)
    lr_policy: str | None = option(
        "Training",
        f"how the learning rate changes: {', '.join(schedule.POLICIES)} (default: {schedule.POLICY}, MXNet's)",
        one_of("learning-rate policy", schedule.POLICIES),
    )
    lr_factor: float | None = option(
        "Training",
        "factor of --lr-policy; by default it multiplies the learning rate at each of --lr-step-epochs (default: "
        f"{schedule.FACTOR})",
        number(0.0, above=True),
    )
    lr_step_epochs: tuple[int, ...] = option(
        "Training",
        "epochs at which --lr-factor applies, for example 30,60; or powX: --lr-policy pow --lr-power X",
        step_epochs,
        (),
        metavar="E,E",
    )
    lr_step_iterations: tuple[int, ...] = option(
        "Training", "the same in iterations (steps), instead of --lr-step-epochs", integers, (), metavar="I,I"
    )
    lr_power: float | None = option("Training", "power of --lr-policy inv, poly and pow", number(0.0))
    lr_by: str = option(
        "Training",
        "what --lr-policy exp, inv, poly and pow count: iteration or epoch",
        one_of("unit", ("iteration", "epoch")),
        "iteration",
    )
    warmup_epochs: float | None = option(
        "Training",
        "number of epochs over which the learning rate rises: from 0, with lbsgd from --lr to the rate of large "
        f"batches (default: {schedule.LARGE_BATCH_WARMUP:g} with lbsgd, else 0)",
        number(0.0),
    )
    warmup_strategy: str = option(
        "Training",
        f"shape of the warm-up: {', '.join(schedule.WARMUPS)}; lars, with lbsgd: a rate for each layer instead",
        one_of("warm-up strategy", (*schedule.WARMUPS, schedule.LARS)),
        "linear",
    )
    macrobatch_size: int = option(
        "Training",
        "samples of all workers in one step, if more than a batch of each: gradients of several batches are added up "
        "(0: off)",
        integer(0),
        0,
    )
    mom: float = option("Training", "momentum", number(0.0), 0.9)
    wd: float = option(
        "Training", "weight decay; as in MXNet, it applies to weights and gammas only", number(0.0), 0.0001
    )
    seed: int = option(
        "Training", "random seed of initial weights, data order, augmentation and dropout", integer(0), 0
    )
