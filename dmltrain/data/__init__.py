"""Data sets by name, the part of them that each worker sees, and batches for the network. numpy only.

    data = load("cifar10", "data/cifar10")
    order = partition.epoch_order(len(data.train), seed, epoch)
    TrainBatches(data.train, partition.shard(order, rank, num_workers), ...)

A new data set is one file with a `DESCRIPTION` and one row in DATASETS.
"""

from pathlib import Path

from dmltrain.data import cifar10, digits, mnist, synthetic
from dmltrain.data.augment import Augmentation
from dmltrain.data.batches import Batch, EvalBatches, TrainBatches
from dmltrain.data.dataset import Dataset, Description, OneByOne, Samples, Split
from dmltrain.errors import UserError

__all__ = [
    "DATASETS",
    "Augmentation",
    "Batch",
    "Dataset",
    "Description",
    "EvalBatches",
    "OneByOne",
    "Samples",
    "Split",
    "TrainBatches",
    "load",
]

DATASETS: dict[str, Description] = {
    "cifar10": cifar10.DESCRIPTION,
    "digits": digits.DESCRIPTION,
    "mnist": mnist.DESCRIPTION,
    "synthetic": synthetic.DESCRIPTION,
}


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    num_examples: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
    download: bool = True,
) -> Dataset:
    """The data set, ready to give its samples.

    data_dir: folder of its files (data/<name> by default). num_examples: the first so many training images only.
    image_shape: (C, H, W) to feed the network, None for the data set's own. seed: of `synthetic`. download: fetch
    what is missing. UserError: unknown name, or the files or numbers are not right.
    """
    if name not in DATASETS:
        raise UserError(f"unknown data set '{name}'; expected one of {', '.join(DATASETS)}")
    return DATASETS[name].load(
        data_dir, num_examples=num_examples, image_shape=image_shape, seed=seed, download=download
    )
