"""The options of the group Training."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import optimizers, schedule
from dmltrain.options.field import option
from dmltrain.options.values import integer, integers, number, one_of


@dataclass(frozen=True)
class TrainingOptions:
    """See `Options`."""

    batch_size: int = option("Training", "samples per worker and step; a worker's devices share them", integer(1), 128)
    num_epochs: int = option("Training", "number of epochs in total, counted from the very first", integer(0), 100)
    optimizer: str = option(
        "Training",
        "the optimizer: " + ", ".join(optimizers.NAMES),
        one_of("optimizer", optimizers.NAMES),
        "sgd",
    )
    lr: float = option("Training", "learning rate", number(0.0), 0.1)
    lr_factor: float = option(
        "Training", "factor that multiplies the learning rate at each of --lr-step-epochs", number(0.0, above=True), 0.1
    )
    lr_step_epochs: tuple[int, ...] = option(
        "Training", "epochs at which --lr-factor applies, for example 30,60", integers, (), metavar="E,E"
    )
    warmup_epochs: float = option(
        "Training", "number of epochs over which the learning rate rises from 0", number(0.0), 0.0
    )
    warmup_strategy: str = option(
        "Training",
        "shape of the warm-up: " + ", ".join(schedule.WARMUPS),
        one_of("warm-up strategy", schedule.WARMUPS),
        "linear",
    )
    mom: float = option("Training", "momentum", number(0.0), 0.9)
    wd: float = option(
        "Training", "weight decay; as in MXNet, it applies to weights and gammas only", number(0.0), 0.0001
    )
    seed: int = option(
        "Training", "random seed of initial weights, data order, augmentation and dropout", integer(0), 0
    )
