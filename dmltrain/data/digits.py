"""digits: 1,797 real handwritten digits of 8x8 pixels, part of the package, so that programs run without a network.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0; the file is the one that scikit-learn distributes (digits.LICENSE.txt).

A fifth of each class is for validation, always the same 360 digits. The same 13 people wrote both splits, so the
accuracy shows that training works, but not how well the network reads the writing of other people.
"""

import functools
import gzip
from importlib import resources
from pathlib import Path

import numpy as np

from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.augment import Augmentation
from dmltrain.data.dataset import Dataset, Description, Split, check_shape, examples_to_use

SHAPE = (1, 8, 8)
NUM_CLASSES = 10
# Over all pixels of the training split, in units of uint8 (0 to 255).
MEAN, STD = (77.81,), (95.85,)


def load(
    data_dir: str | Path | None = None,
    *,
    num_examples: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
    download: bool = True,
) -> Dataset:
    """1,437 digits for training, 360 for validation. data_dir, seed and download are not used."""
    shape = check_shape("digits", image_shape, SHAPE, SHAPE)
    images, labels = _read()
    train, validation = _split(labels)
    train = train[: examples_to_use(num_examples, len(train))]
    augmentation = Augmentation(crop=shape[1:])
    return Dataset(
        "digits",
        Split(images[train], labels[train], augmentation),
        Split(images[validation], labels[validation], augmentation),
        NUM_CLASSES,
        shape,
        Normalisation(MEAN, STD),
    )


@functools.cache
def _read() -> tuple[Array, Array]:
    """images uint8 (1797, 1, 8, 8), the file's 0 to 16 scaled to 0 to 255; labels int64 (1797,)."""
    text = gzip.decompress(resources.files("dmltrain.data").joinpath("digits.csv.gz").read_bytes())
    rows = np.fromstring(text.replace(b"\n", b",").rstrip(b","), np.int64, sep=",").reshape(-1, 65)
    images = (rows[:, :64] * 255 + 8) // 16
    return images.astype(np.uint8).reshape(-1, *SHAPE), rows[:, 64].copy()


def _split(labels: Array) -> tuple[Array, Array]:
    """Samples of the training and the validation split, each in the file's order.

    All are sorted by class, in random order within a class; then every fifth is for validation. So this is a fifth of
    each class, give or take one.
    """
    chance = random_bits.words(len(labels), 0, 0, random_bits.DIGITS_SPLIT)
    validation = np.sort(np.lexsort((chance, labels))[::5])
    return np.setdiff1d(np.arange(len(labels)), validation), validation


DESCRIPTION = Description(NUM_CLASSES, SHAPE, load, normalisation=Normalisation(MEAN, STD))
