"""Images in memory as a reader's records, so that small data sets go through the augmentation of image files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.broken import Broken
from dmltrain.data.dataset import Dataset, Samples, Shape, Split
from dmltrain.data.decoded import Decoded
from dmltrain.data.images import ImageAugmentation
from dmltrain.data.readers import Record


@dataclass(frozen=True, eq=False)
class Pixels:
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
    broken = Broken(0, lambda line: None)

    def decoded(split: Samples) -> Decoded:
        assert isinstance(split, Split), dataset.name
        reader = Pixels(dataset.name, split.images, split.labels)
        return Decoded(reader, len(split), augmentation, shape, dataset.num_classes, broken)

    return replace(dataset, train=decoded(dataset.train), validation=decoded(dataset.validation), image_shape=shape)
