"""The options of the group Training."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import optimizers
from dmltrain.layers import INITIALISERS
from dmltrain.options.field import Group, option
from dmltrain.options.values import integer, number, one_of

CONSTANT, SCALED = "constant", "per-worker-scaled-lr"
BATCHES = (CONSTANT, "per-worker", SCALED)


@dataclass(frozen=True)
class TrainingOptions(Group):
    """See `Options`."""

    equal_on_members = True

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
        "Training", "the optimizer: " + ", ".join(optimizers.NAMES), one_of("optimizer", optimizers.NAMES), "sgd"
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
