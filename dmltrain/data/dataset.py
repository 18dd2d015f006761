"""The interface of a data set: its description, which needs no loading, and its samples.

Other modules do not assume that a data set fits in memory or that its images have one size: a split returns the
pixels of the network's input, augmented and cropped, for the samples that it is asked for; the trainers normalise them
on their devices. `Split` has all images in memory; `Decoded` (decoded.py) decodes each sample when it is needed.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data import augment as augmenting
from dmltrain.data.augment import Augmentation
from dmltrain.data.broken import SkippedRecords
from dmltrain.data.images import ImageAugmentation

Shape = tuple[int, int, int]
Inputs = tuple[Array, Array]  # images uint8 (n, C, H, W) in any order of memory; labels int64 (n,)
ABSENT = -1  # in place of a label


class Samples(Protocol):
    """A split of a data set. Several threads call its methods at once."""

    def __len__(self) -> int: ...

    def new_images(self, count: int) -> Array:
        """A new array for `count` images: uint8 (count, C, H, W), in the memory order that this split writes best."""

    def training(self, samples: Array, words: Array, out: Array | None = None) -> Inputs:
        """These samples (int64 (n,), from 0 to len - 1; n may be 0), augmented; the images are in `out` if it is given.

        `words`, uint64 (n,), are the only random numbers of the samples; they depend on the seed, the epoch and the
        position in it only. The label of a sample that is left out, because it cannot be decoded, is ABSENT.
        """

    def evaluation(self, samples: Array, out: Array | None = None) -> Inputs:
        """These samples without augmentation."""


class Load(Protocol):
    """Opens a data set: checks its files and downloads missing ones. Raises UserError for invalid files or numbers."""

    def __call__(
        self,
        data_dir: str | Path | None = None,
        *,
        num_examples: int | None = None,
        image_shape: Shape | None = None,
        seed: int = 0,
        download: bool = True,
    ) -> "Dataset": ...


@dataclass(frozen=True)
class Description:
    """A data set's properties, known without loading it. `image_shape`: default (C, H, W) of the network's input.

    augmentation, normalisation: of its images, also where they come from files of the user (fields of
    ImageAugmentation). reads_files: it has no files of its own, and `load` takes `files`, an ImageFiles. is_made: its
    images are computed, not read, and `load` takes `num_classes` and `part`: (rank of a worker, number of workers).
    """

    num_classes: int
    image_shape: Shape
    load: Load
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    normalisation: Normalisation = field(default_factory=Normalisation)
    reads_files: bool = False
    is_made: bool = False


@dataclass(frozen=True)
class ImageFiles:
    """Which files of images to read, and how. readers.open_reader explains indexes, root and devkit.

    train, validation: files or folders, one after another. num_classes: None for as many as the files tell.
    skip_broken: records that may be skipped in an epoch. warn: takes what the user should know.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    train_index: str | None = None
    validation_index: str | None = None
    root: str | None = None
    devkit: str | None = None
    num_classes: int | None = None
    augmentation: ImageAugmentation = field(default_factory=ImageAugmentation)
    skip_broken: int = 0
    warn: Callable[[str], None] = logging.getLogger("dmltrain.data").warning


@dataclass(frozen=True, eq=False)
class Split:
    """Samples in memory: images uint8 (N, C, H, W), labels int64 (N,)."""

    images: Array
    labels: Array
    augment: Augmentation

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(f"images: {self.images.dtype} {self.images.shape}, expected uint8 (N, C, H, W)")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"labels: {self.labels.dtype} {self.labels.shape} for images {self.images.shape}")

    def __len__(self) -> int:
        return len(self.labels)

    def new_images(self, count: int) -> Array:
        return np.empty((count, self.images.shape[1], *self.augment.crop), np.uint8)

    def training(self, samples: Array, words: Array, out: Array | None = None) -> Inputs:
        height, width = self.images.shape[2:]
        draws = augmenting.choose(self.augment, height, width, words)
        images = augmenting.training_images(self.images, samples, self.augment, draws)
        return _placed(images, out), self.labels[samples]

    def evaluation(self, samples: Array, out: Array | None = None) -> Inputs:
        return _placed(augmenting.evaluation_images(self.images, samples, self.augment), out), self.labels[samples]


def _placed(images: Array, out: Array | None) -> Array:
    if out is None:
        return images
    out[:] = images
    return out


@dataclass(frozen=True, eq=False)
class First:
    """The first `count` samples of others, or all if there are fewer."""

    samples: Samples
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.samples))

    def new_images(self, count: int) -> Array:
        return self.samples.new_images(count)

    def training(self, samples: Array, words: Array, out: Array | None = None) -> Inputs:
        return self.samples.training(samples, words, out)

    def evaluation(self, samples: Array, out: Array | None = None) -> Inputs:
        return self.samples.evaluation(samples, out)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a validation split; `image_shape` is the network's input (C, H, W), after the crop;
    `normalisation` is what the trainers do with the pixels of both. digests: what workers compare at the start, by the
    name of the data. broken: the records that were skipped, if any can be."""

    name: str
    train: Samples
    validation: Samples
    num_classes: int
    image_shape: Shape
    normalisation: Normalisation = field(default_factory=Normalisation)
    digests: Mapping[str, str] = field(default_factory=dict)  # sha256
    broken: SkippedRecords | None = None


def examples_to_use(num_examples: int | None, available: int) -> int:
    """Number of training samples to read. A larger --num-examples is the length of an epoch, which repeats them."""
    if num_examples is None:
        return available
    check_count(num_examples)
    return min(num_examples, available)


def check_count(num_examples: int) -> None:
    if num_examples < 1:
        raise UserError(f"--num-examples {num_examples}: expected 1 or more")


def check_shape(
    name: str,
    wanted: tuple[int, int, int] | None,
    image: tuple[int, int, int],
    default: tuple[int, int, int],
    pad: int = 0,
) -> tuple[int, int, int]:
    """The shape of the network's input, (C, H, W). UserError unless it is a crop of the padded image."""
    if wanted is None:
        return default
    channels, height, width = image
    fits = len(wanted) == 3 and wanted[0] == channels and 1 <= wanted[1] <= height + 2 * pad
    if not fits or not 1 <= wanted[2] <= width + 2 * pad:
        padded = f" padded by {pad}" if pad else ""
        raise UserError(
            f"--image-shape {','.join(map(str, wanted))}: {name} has images of {channels},{height},{width}{padded};"
            f" expected {channels} channel(s) and a height and width of at most {height + 2 * pad},{width + 2 * pad}"
        )
    return wanted
