"""Small images for networks of large ones: each pixel becomes a square, and zeros fill the rest.

The published profile of Inception-v3 on CIFAR-10 has images of 299x299: each of 32x32 pixels is repeated 9 times in
both directions, which makes 288, and 5 zeros come before and 6 after them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.dataset import Dataset, Inputs, Samples, Shape, Split


@dataclass(frozen=True, eq=False)
class Enlarged:
    """`split` in images of `shape`, each pixel `factor` times in both directions, zeros around."""

    split: Samples
    factor: int
    shape: Shape

    def __len__(self) -> int:
        return len(self.split)

    def new_images(self, count: int) -> Array:
        return np.empty((count, *self.shape), np.uint8)

    def training(self, samples: Array, words: Array, out: Array | None = None) -> Inputs:
        return self._enlarged(*self.split.training(samples, words), out)

    def evaluation(self, samples: Array, out: Array | None = None) -> Inputs:
        return self._enlarged(*self.split.evaluation(samples), out)

    def _enlarged(self, small: Array, labels: Array, out: Array | None) -> Inputs:
        images = self.new_images(len(small)) if out is None else out
        images[:] = 0
        height, width = (edge * self.factor for edge in small.shape[2:])
        top, left = (self.shape[1] - height) // 2, (self.shape[2] - width) // 2
        inside = images[:, :, top : top + height, left : left + width]
        for row in range(self.factor):
            for column in range(self.factor):
                inside = images[
                    :, :, top + row : top + height : self.factor, left + column : left + width : self.factor
                ]
                inside[:] = small
        return images, labels


def inner_shape(image: Shape, factor: int, wanted: Shape) -> Shape:
    """The largest crop of the image that fits into `wanted` once it is enlarged. UserError: there is none."""
    height, width = (min(edge, most // factor) for edge, most in zip(image[1:], wanted[1:], strict=True))
    if min(height, width) < 1 or image[0] != wanted[0]:
        raise UserError(
            f"--enlarge {factor}: images of {','.join(map(str, image))} do not fit into --image-shape "
            f"{','.join(map(str, wanted))}: expected {image[0]} channel(s) and at least {factor} pixels each way"
        )
    return image[0], height, width


def enlarged(dataset: Dataset, factor: int, shape: Shape) -> Dataset:
    """A data set in memory with images of `shape`. UserError: they do not fit."""

    def larger(split: Samples) -> Enlarged:
        assert isinstance(split, Split), dataset.name
        channels, height, width = split.images.shape[1:]
        inner = inner_shape((channels, height, width), factor, shape)
        return Enlarged(replace(split, augment=replace(split.augment, crop=inner[1:])), factor, shape)

    return replace(dataset, train=larger(dataset.train), validation=larger(dataset.validation), image_shape=shape)
