"""Augmentation of images in memory, for a whole batch at once: pad, crop, mirror. Pixels stay uint8.

Training crops at random, validation at the centre, as MXNet's ImageRecordIter does with a `data_shape` smaller than the
image. So the published results of train_cifar10.py are those of a 28x28 network on the centre of each 32x32 image, and
of a 32x32 network on the whole image.

The random numbers of a sample depend on the seed, the epoch and its position in the epoch's permutation only, never on
the rank, the batch size or the number of workers: n workers see the same pixels as one process.
"""

from dataclasses import dataclass

import numpy as np

from dmltrain.base import random_bits
from dmltrain.base.arrays import Array


@dataclass(frozen=True)
class Augmentation:
    """How an image is cut out.

    pad: pixels added on each side, of value `fill` (127, as in MXNet's train_cifar10.py). crop: (height, width) of the
    crop from the padded image. mirror: flip left to right with probability 1/2.
    """

    crop: tuple[int, int]
    pad: int = 0
    mirror: bool = False
    fill: int = 127


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of samples, by position in the epoch's permutation: top, left int64 (N,), mirror bool (N,)."""

    top: Array  # of the crop, in pixels of the padded image
    left: Array
    mirror: Array


def draw(augmentation: Augmentation, height: int, width: int, num_examples: int, seed: int, epoch: int) -> Draws:
    """Crop and mirror for each position of the epoch, for images of height x width pixels."""
    return choose(augmentation, height, width, words(num_examples, seed, epoch))


def words(num_examples: int, seed: int, epoch: int) -> Array:
    """The random word of each position of the epoch, uint64 (num_examples,)."""
    return random_bits.words(num_examples, seed, epoch, random_bits.AUGMENTATION)


def choose(augmentation: Augmentation, height: int, width: int, bits: Array) -> Draws:
    """Crop and mirror from random words, for images of height x width pixels."""
    tops, lefts = _choices(augmentation, height, width)
    return Draws(
        _below(bits, tops),
        _below(bits >> np.uint64(24), lefts),
        (bits >> np.uint64(63)).astype(bool) & augmentation.mirror,
    )


def training_images(
    images: Array, samples: Array, augmentation: Augmentation, draws: Draws, positions: slice = slice(None)
) -> Array:
    """The samples, augmented: uint8 (n, C, h, w). `positions`: of `draws`, for these samples."""
    crops = _crop(images, samples, augmentation, draws.top[positions], draws.left[positions])
    flipped = draws.mirror[positions]
    crops[flipped] = crops[flipped, :, :, ::-1]
    return crops


def evaluation_images(images: Array, samples: Array, augmentation: Augmentation) -> Array:
    """The samples, cropped at the centre: uint8 (n, C, h, w)."""
    tops, lefts = _choices(augmentation, *images.shape[2:])
    top = np.full(len(samples), (tops - 1) // 2)
    left = np.full(len(samples), (lefts - 1) // 2)
    return _crop(images, samples, augmentation, top, left)


def _choices(augmentation: Augmentation, height: int, width: int) -> tuple[int, int]:
    """The number of possible crops: vertically, horizontally."""
    down = height + 2 * augmentation.pad - augmentation.crop[0] + 1
    across = width + 2 * augmentation.pad - augmentation.crop[1] + 1
    if min(down, across) < 1:
        raise ValueError(f"crop {augmentation.crop} of images {height}x{width} padded by {augmentation.pad}")
    return down, across


def _below(bits: Array, limit: int) -> Array:
    """The low 24 bits as a number in [0, limit), int64; the bias is below limit / 2**24."""
    return (((bits & np.uint64(0xFFFFFF)) * np.uint64(limit)) >> np.uint64(24)).astype(np.int64)


def _crop(images: Array, samples: Array, augmentation: Augmentation, top: Array, left: Array) -> Array:
    """uint8 (n, C, h, w): one crop of each image, from a view of all possible ones (n, C, tops, lefts, h, w)."""
    pad = augmentation.pad
    padded = images[samples]
    if pad:
        count, channels, height, width = padded.shape
        inside = padded
        padded = np.full((count, channels, height + 2 * pad, width + 2 * pad), augmentation.fill, np.uint8)
        padded[:, :, pad:-pad, pad:-pad] = inside
    # The type stub of numpy 1.26 allows a single axis only.
    all_crops = np.lib.stride_tricks.sliding_window_view(  # type: ignore[call-overload]
        padded, augmentation.crop, axis=(2, 3)
    )
    crops: Array = all_crops[np.arange(len(samples)), :, top, left]
    return crops
