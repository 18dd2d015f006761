"""imagenet: labelled images in files of the user, such as ILSVRC12 packed into train.rec. readers/ has the formats.

O. Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (2015), https://image-net.org: 1,281,167
training and 50,000 validation images in 1,000 classes. Nothing is downloaded, and nothing is unpacked. Any other images
in one of the formats will do as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain.base.normalisation import Normalisation
from dmltrain.data import image_files, source
from dmltrain.data.dataset import Dataset, Description, ImageFiles, Shape, check_count

NUM_CLASSES = 1000
DEFAULT_SHAPE = (3, 224, 224)
NORMALISATION = Normalisation((123.68, 116.779, 103.939), (1.0, 1.0, 1.0))  # MXNet's default
TRAIN = ("train.rec", "ILSVRC2012_img_train.tar", "train")  # in --data-dir
VALIDATION = ("val.rec", "ILSVRC2012_img_val.tar", "val")


def load(
    data_dir: str | Path | None = None,
    *,
    num_examples: int | None = None,
    image_shape: Shape | None = None,
    seed: int = 0,
    download: bool = True,
    files: ImageFiles | None = None,
) -> Dataset:
    """files: what to read and how; without it, what lies in data_dir (default: data/imagenet) under the names in TRAIN
    and VALIDATION, with 1,000 classes. seed and download are not used. UserError: see image_files.load."""
    if num_examples is not None:
        check_count(num_examples)
    files = files or ImageFiles(num_classes=NUM_CLASSES)
    if not files.train:
        validation = files.validation or _first_existing(data_dir, VALIDATION)
        files = replace(files, train=_first_existing(data_dir, TRAIN), validation=validation)
    return image_files.load("imagenet", files, image_shape or DEFAULT_SHAPE, NORMALISATION, num_examples)


def _first_existing(data_dir: str | Path | None, names: Sequence[str]) -> tuple[str, ...]:
    """The first of these files that exists in the folder."""
    present = [path for name in names if (path := source.folder(data_dir, "imagenet") / name).exists()]
    return tuple(map(str, present[:1]))


DESCRIPTION = Description(NUM_CLASSES, DEFAULT_SHAPE, load, normalisation=NORMALISATION, reads_files=True)
