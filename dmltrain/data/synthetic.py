"""synthetic: random images of any shape, for speed measurements and tests. Ten classes, learnable in an epoch, or more.

Each class has a random image; a sample is the mean of its class's image and noise. Everything depends on the seed only.
With parts of their own the workers have every n-th training sample, and the same validation samples.
"""

from pathlib import Path

import numpy as np

from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.augment import Augmentation
from dmltrain.data.dataset import Dataset, Description, Shape, Split, check_count

NUM_CLASSES = 10
DEFAULT_SHAPE = (3, 32, 32)
DEFAULT_EXAMPLES = 1024


def load(
    data_dir: str | Path | None = None,
    *,
    num_examples: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
    download: bool = True,
    num_classes: int = NUM_CLASSES,
    part: tuple[int, int] | None = None,
) -> Dataset:
    """num_examples (default 1,024) for training, a quarter of it for validation (at least one of each class).

    part: (rank, number of workers), if each worker has samples of its own. data_dir is not used.
    """
    shape = DEFAULT_SHAPE if image_shape is None else tuple(image_shape)
    count = DEFAULT_EXAMPLES if num_examples is None else num_examples
    check_count(count)
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"--image-shape {','.join(map(str, shape))}: expected channels,height,width, each 1 or more")
    validation = max(count // 4, num_classes)
    images = _bytes((num_classes + count + validation, *shape), seed)
    classes, noise = images[:num_classes] // 2, images[num_classes:]
    labels = np.arange(count + validation) % num_classes
    noise //= 2
    for start in range(0, len(noise), 256):  # in slices: the whole sum at once would need twice the memory
        some = slice(start, start + 256)
        noise[some] += classes[labels[some]]
    augmentation = Augmentation(crop=shape[1:])
    rank, workers = part or (0, 1)
    return Dataset(
        "synthetic",
        Split(noise[rank:count:workers], labels[rank:count:workers], augmentation),
        Split(noise[count:], labels[count:], augmentation),
        num_classes,
        shape,
        Normalisation((127.0,), (52.0,)),  # noise/2 and class/2: 74/sqrt(2)
    )


def _bytes(shape: tuple[int, ...], seed: int) -> Array:
    """Random uint8, the same on machines of either byte order."""
    count = int(np.prod(shape))
    words = random_bits.words(-(-count // 8), seed, 0, random_bits.SYNTHETIC)
    return words.astype("<u8", copy=False).view(np.uint8)[:count].reshape(shape)


def benchmark(shape: Shape, num_classes: int, count: int, seed: int = 0) -> Dataset:
    """`count` images of noise, for measurements without files, of networks with any number of classes. There is nothing
    to learn, and no validation."""
    labels = random_bits.words(count, seed, 1, random_bits.SYNTHETIC) % np.uint64(num_classes)
    split = Split(_bytes((count, *shape), seed), labels.astype(np.int64), Augmentation(crop=shape[1:]))
    nothing = Split(split.images[:0], split.labels[:0], split.augment)
    return Dataset("benchmark", split, nothing, num_classes, shape, Normalisation((127.5,), (73.9,)))


DESCRIPTION = Description(NUM_CLASSES, DEFAULT_SHAPE, load, is_made=True)
