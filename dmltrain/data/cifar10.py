"""CIFAR-10: 50,000 + 10,000 colour images of 32x32 pixels in ten classes.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), https://www.cs.toronto.edu/~kriz/cifar.html.
The folder may have the binary or the python batches, unpacked or in their archives (cifar10_files.py). Only the batches
that --num-examples needs are read, and each of them is checked.

Augmentation is that of MXNet's train_cifar10.py: pad 4 (with 127), random crop of 28x28, mirror; 32x32 by
`image_shape`. Validation uses the centre (augment.py).
"""

from pathlib import Path

import numpy as np

from dmltrain.base.normalisation import Normalisation
from dmltrain.data import cifar10_files, source
from dmltrain.data.augment import Augmentation
from dmltrain.data.cifar10_files import BASE_URL, CIFAR10, Cifar10Files
from dmltrain.data.dataset import Dataset, Description, Split, check_shape, examples_to_use

SHAPE = (3, 32, 32)
NUM_CLASSES = 10
DEFAULT_SHAPE = (3, 28, 28)
PAD = 4
# Per channel (R, G, B) over the training images, in units of uint8: 255 x (0.4914, 0.4822, 0.4465) and, for std,
# 255 x (0.2023, 0.1994, 0.2010), the widely used constants (the std is the mean over images of each image's own std).
MEAN = (125.307, 122.961, 113.8575)
STD = (51.5865, 50.847, 51.255)


def load(
    data_dir: str | Path | None = None,
    *,
    num_examples: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
    download: bool = True,
    files: Cifar10Files = CIFAR10,
    base_url: str = BASE_URL,
) -> Dataset:
    """50,000 training images and 10,000 validation images.

    data_dir: the folder of the files or archives, or its parent if the folder's name is cifar10; default data/cifar10.
    If it has none of the forms, cifar-10-binary.tar.gz is downloaded into it. UserError: a missing or damaged file,
    or an image_shape that is no crop.
    """
    shape = check_shape("cifar10", image_shape, SHAPE, DEFAULT_SHAPE, PAD)
    rows = files.rows
    count = examples_to_use(num_examples, rows * len(files.train))
    needed = files.train[: -(-count // rows)]
    folder = source.folder(data_dir, "cifar10")
    images, labels = np.empty((count, *SHAPE), np.uint8), np.empty(count, np.int64)
    augmentation = Augmentation(crop=shape[1:], pad=PAD, mirror=True)
    validation = None
    for batch, arrays in cifar10_files.read(folder, (*needed, files.test), files, download, base_url):
        if batch == files.test:
            validation = Split(*arrays, augmentation)
        else:
            start = needed.index(batch) * rows
            images[start : start + rows] = arrays[0][: count - start]
            labels[start : start + rows] = arrays[1][: count - start]
    assert validation is not None  # read() yields every batch or raises
    return Dataset(
        "cifar10", Split(images, labels, augmentation), validation, NUM_CLASSES, shape, Normalisation(MEAN, STD)
    )


AUGMENTATION = {"pad_size": PAD, "random_crop": True, "random_mirror": True}  # what `load` does
DESCRIPTION = Description(NUM_CLASSES, DEFAULT_SHAPE, load, AUGMENTATION, Normalisation(MEAN, STD))
