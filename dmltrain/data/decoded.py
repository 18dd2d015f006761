"""Samples of a reader: records are read, decoded and augmented when they are needed, one by one.

`PixelReader` gives images in memory as such records, so that small data sets have the augmentation of image files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.broken import BrokenEstimate, SkippedRecords, estimate_broken
from dmltrain.data.dataset import ABSENT, Dataset, Inputs, Samples, Shape, Split
from dmltrain.data.images import BrokenImage, ImageAugmentation, evaluation_image, training_image
from dmltrain.data.readers import Reader, Record
from dmltrain.data.readers.reader import one_label


@dataclass(frozen=True, eq=False)
class Decoded:
    """The first `count` records of `reader` as images of `shape`, with labels below num_classes."""

    reader: Reader
    count: int
    augmentation: ImageAugmentation
    shape: Shape
    num_classes: int
    broken: SkippedRecords

    def __len__(self) -> int:
        return self.count

    def new_images(self, count: int) -> Array:
        """Channels last in memory, as decoders write and PyTorch convolves."""
        channels, height, width = self.shape
        return np.empty((count, height, width, channels), np.uint8).transpose(0, 3, 1, 2)

    def training(self, samples: Array, words: Array, out: Array | None = None) -> Inputs:
        return self._inputs(samples, words.tolist(), out)

    def evaluation(self, samples: Array, out: Array | None = None) -> Inputs:
        return self._inputs(samples, [None] * len(samples), out)

    def touch(self, index: int) -> None:
        """Read a record from the disk and drop it, for batches.ReadAhead. Errors show when the record is needed."""
        with contextlib.suppress(UserError):
            self.reader.read(index)

    def _inputs(self, samples: Array, words: list[int | None], out: Array | None) -> Inputs:
        images = self.new_images(len(samples)) if out is None else out
        rows = images.transpose(0, 2, 3, 1)
        labels = [self._label(*each) for each in zip(samples.tolist(), words, rows, strict=True)]
        return images, np.array(labels, np.int64)

    def _label(self, index: int, word: int | None, out: Array) -> int:
        """Writes the image to `out`, and returns its label, or ABSENT."""
        try:
            record = self.reader.read(index)
        except UserError as error:
            self.broken.note(str(error), word is None, self._estimate_broken)
            return ABSENT
        try:
            if word is None:
                evaluation_image(record.image, self.augmentation, self.shape, out)
            else:
                training_image(record.image, self.augmentation, self.shape, word, out)
        except BrokenImage as error:
            self.broken.note(f"{self.reader.where(index)}: {error}", word is None, self._estimate_broken)
            return ABSENT
        return self._checked(record, index)

    def _estimate_broken(self) -> BrokenEstimate:
        out = self.new_images(1).transpose(0, 2, 3, 1)[0]
        return estimate_broken(lambda index: self._is_broken(index, out), self.count)

    def _is_broken(self, index: int, out: Array) -> bool:
        try:
            evaluation_image(self.reader.read(index).image, self.augmentation, self.shape, out)
        except (UserError, BrokenImage):
            return True
        return False

    def _checked(self, record: Record, index: int) -> int:
        try:
            label = one_label(record)
        except ValueError as error:
            raise UserError(f"{self.reader.where(index)}: {error}") from None
        if not (label.is_integer() and 0 <= label < self.num_classes):
            raise UserError(
                f"{self.reader.where(index)}: its label is {label:g}, expected an integer from 0 to "
                f"{self.num_classes - 1}: correct the labels, or give another --num-classes"
            )
        return int(label)


@dataclass(frozen=True, eq=False)
class PixelReader:
    """images uint8 (N, C, H, W), labels int64 (N,); `name` of the data set, for messages."""

    name: str
    images: Array
    labels: Array
    class_names = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Record:
        image = np.ascontiguousarray(self.images[index].transpose(1, 2, 0))
        return Record(self.labels[index : index + 1].astype(np.float32), image)

    def where(self, index: int) -> str:
        return f"{self.name}: sample {index}"

    def number(self, index: int) -> int:
        return index

    def digest(self) -> str:
        """Not needed: the files of these data sets have checksums."""
        return ""


def augmented(dataset: Dataset, changes: Mapping[str, Any], shape: Shape) -> Dataset:
    """A data set in memory with images of `shape` that ImageAugmentation(**changes) makes. UserError: it cannot."""
    augmentation = ImageAugmentation(**changes)
    augmentation.check(shape)
    broken = SkippedRecords(0, lambda line: None)

    def decoded(split: Samples) -> Decoded:
        assert isinstance(split, Split), dataset.name
        reader = PixelReader(dataset.name, split.images, split.labels)
        return Decoded(reader, len(split), augmentation, shape, dataset.num_classes, broken)

    return replace(dataset, train=decoded(dataset.train), validation=decoded(dataset.validation), image_shape=shape)
