"""Data sets by name, each worker's part of them, and batches for the network. numpy only.

    data = load("cifar10", "data/cifar10")
    parts = Shared(len(data.train), num_workers, batch_size, samples=len(data.train))
    TrainBatches(data.train, parts.part(rank, seed, epoch))

A new data set is one file with a `DESCRIPTION` and one row in DATASETS.
"""

from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.data import cifar10, digits, image_files, imagenet, mnist, synthetic
from dmltrain.data.assignment.parts import Local, Shared
from dmltrain.data.augment import Augmentation
from dmltrain.data.batches import Batch, EvalBatches, TrainBatches
from dmltrain.data.dataset import Dataset, Description, ImageFiles, Samples, Split

__all__ = [
    "DATASETS",
    "Augmentation",
    "Batch",
    "Dataset",
    "Description",
    "EvalBatches",
    "ImageFiles",
    "Local",
    "Samples",
    "Shared",
    "Split",
    "TrainBatches",
    "load",
]

DATASETS: dict[str, Description] = {
    "cifar10": cifar10.DESCRIPTION,
    "digits": digits.DESCRIPTION,
    "imagenet": imagenet.DESCRIPTION,
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
    files: ImageFiles | None = None,
    **more: Any,
) -> Dataset:
    """Open the data set `name`.

    data_dir: folder of its files (default: data/<name>). num_examples: use only this many training images, the first.
    image_shape: (C, H, W) of the network's input, None for the data set's default. seed: of `synthetic`. download:
    fetch missing files. files: of images to read instead of the data set's own. more: what only this data set's `load`
    takes. UserError: unknown name, or invalid files or numbers.
    """
    if name not in DATASETS:
        raise UserError(f"unknown data set '{name}'; expected one of {', '.join(DATASETS)}")
    known = DATASETS[name]
    if files is not None and files.train and not known.reads_files:
        return image_files.load(name, files, image_shape or known.image_shape, known.normalisation, num_examples)
    more |= {"files": files} if known.reads_files and files is not None else {}
    return known.load(
        data_dir, num_examples=num_examples, image_shape=image_shape, seed=seed, download=download, **more
    )
