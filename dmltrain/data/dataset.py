"""What a loader returns: images and labels in memory, and how they become what the network is fed."""

from dataclasses import dataclass

import numpy as np

from dmltrain.data.augment import Augmentation
from dmltrain.errors import UserError


@dataclass(frozen=True, eq=False)
class Split:
    """images uint8 (N, C, H, W), labels int64 (N,)."""

    images: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(f"images: {self.images.dtype} {self.images.shape}, expected uint8 (N, C, H, W)")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"labels: {self.labels.dtype} {self.labels.shape} for images {self.images.shape}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a validation split; `image_shape` is (C, H, W) as fed to the network, after the crop."""

    name: str
    train: Split
    validation: Split
    num_classes: int
    image_shape: tuple[int, int, int]
    augment: Augmentation


def examples_to_use(name: str, num_examples: int | None, available: int) -> int:
    """How many training examples to read, the first ones, as MXNet's --num-examples. UserError: more than there are."""
    if num_examples is None:
        return available
    check_count(num_examples)
    if num_examples > available:
        raise UserError(f"--num-examples {num_examples}: {name} has {available} training examples")
    return num_examples


def check_count(num_examples: int) -> None:
    if num_examples < 1:
        raise UserError(f"--num-examples {num_examples}: expected 1 or more")


def check_shape(name: str, wanted: tuple[int, int, int] | None, image: tuple[int, int, int],
                default: tuple[int, int, int], pad: int = 0) -> tuple[int, int, int]:
    """The image shape to feed, (C, H, W). UserError unless it is a crop of the padded image."""
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
