"""MNIST: 60,000 + 10,000 handwritten digits of 28x28 pixels, from the four canonical idx files.

Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits" (1998). Files may be
compressed with gzip, and may have a dot instead of the second hyphen (train-images.idx3-ubyte), as some programs unpack
them. The md5 of a compressed file is checked before it is opened; size, magic number, counts and md5 of the content
are checked in any case.

idx: big-endian uint32 magic (0x0801 labels, 0x0803 images), one uint32 per dimension, then bytes.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data import source
from dmltrain.data.augment import Augmentation
from dmltrain.data.dataset import Dataset, Description, Split, check_shape, examples_to_use
from dmltrain.data.download import Remote, fetch

BASE_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SHAPE = (1, 28, 28)
NUM_CLASSES = 10


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: md5 of its content, and of the published .gz file."""

    name: str
    shape: tuple[int, ...]
    md5: str
    md5_gzip: str

    @property
    def size(self) -> int:
        return 4 + 4 * len(self.shape) + int(np.prod(self.shape))


@dataclass(frozen=True)
class MnistFiles:
    train_images: IdxFile
    train_labels: IdxFile
    test_images: IdxFile
    test_labels: IdxFile


MNIST = MnistFiles(
    IdxFile(
        "train-images-idx3-ubyte",
        (60000, 28, 28),
        "6bbc9ace898e44ae57da46a324031adb",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    ),
    IdxFile(
        "train-labels-idx1-ubyte", (60000,), "a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        (10000, 28, 28),
        "2646ac647ad5339dbf082846283269ea",
        "9fb629c4189551a2d022fa330f9573f3",
    ),
    IdxFile("t10k-labels-idx1-ubyte", (10000,), "27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c"),
)


def load(
    data_dir: str | Path | None = None,
    *,
    num_examples: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
    download: bool = True,
    files: MnistFiles = MNIST,
    base_url: str = BASE_URL,
) -> Dataset:
    """60,000 training and 10,000 validation digits; input is pixel / 255, as in MNISTIter. Downloads missing files.

    data_dir: the folder of the files, or its parent if the folder's name is mnist; default data/mnist. UserError: a
    missing or damaged file.
    """
    shape = check_shape("mnist", image_shape, SHAPE, SHAPE)
    count = examples_to_use(num_examples, files.train_images.shape[0])
    folder = source.folder(data_dir, "mnist")

    def array(file: IdxFile) -> Array:
        return parse(file, _contents(file, folder, download, base_url))

    augmentation = Augmentation(crop=shape[1:])
    train = Split(
        array(files.train_images)[:count, None], array(files.train_labels)[:count].astype(np.int64), augmentation
    )
    validation = Split(array(files.test_images)[:, None], array(files.test_labels).astype(np.int64), augmentation)
    return Dataset("mnist", train, validation, NUM_CLASSES, shape, Normalisation(std=(255.0,)))


def parse(file: IdxFile, data: bytes) -> Array:
    """uint8 of the file's shape, a read-only view of the data. UserError: another magic number or shape."""
    dimensions = len(file.shape)
    magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
    if (magic, *shape) != (0x0800 + dimensions, *file.shape):
        raise UserError(
            f"{file.name}: starts with magic number {magic:#06x} and dimensions {shape}, expected "
            f"{0x0800 + dimensions:#06x} and {list(file.shape)}: not the MNIST file of this name"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(file.shape)


def _contents(file: IdxFile, folder: Path, download: bool, base_url: str) -> bytes:
    """The unpacked and checked content, from any form of the file in the folder, else from a download."""
    dotted = file.name.replace("-idx", ".idx")
    for name in (file.name, dotted):
        if (path := folder / name).exists():
            return source.read(path, file.size, file.md5)
        if (path := folder / f"{name}.gz").exists():
            return source.read_gzip(path, file.size, file.md5, file.md5_gzip)
    if not download:
        raise UserError(
            f"{file.name}.gz (or {file.name}) is not in {folder}; put it there "
            f"(from {base_url}{file.name}.gz), or allow the download"
        )
    path = fetch(Remote(base_url + file.name + ".gz", file.md5_gzip), folder)
    return source.read_gzip(path, file.size, file.md5, file.md5_gzip)


DESCRIPTION = Description(NUM_CLASSES, SHAPE, load)
