"""The archives of ILSVRC2012 as they were published. Nothing is unpacked.

ILSVRC2012_img_train.tar has a tar archive of images for each class. ILSVRC2012_img_val.tar has images alone; the devkit
has their labels, that of image n in line n. Labels number the synsets in the order of their names: n01440764 is 0.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.readers import devkit, stored_index, tar, tar_index
from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data.readers.reader import Format, Record, SampleSource
from dmltrain.data.readers.tar_index import TarIndex


class TarReader:
    """labels: of each image, int32 (n,); None: the number of its class."""

    def __init__(
        self, path: Path, file: DataFile, index: TarIndex, class_names: tuple[str, ...], labels: Array | None = None
    ) -> None:
        self._path, self._file, self._index, self._labels = path, file, index, labels
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self._index.offsets)

    def read(self, index: int) -> Record:
        try:
            image = self._file.read(int(self._index.offsets[index]), int(self._index.sizes[index]))
        except Damaged as error:
            raise UserError(f"{self.where(index)}: {error}") from None
        return Record(np.array([self._label(index)], np.float32), image)

    def where(self, index: int) -> str:
        offset = int(self._index.offsets[index])
        try:
            place = offset - tar.BLOCK
            name = tar.header(self._file.read(place, tar.BLOCK), place)[0].decode(errors="replace")
        except Damaged:
            name = f"number {self._index.numbers[index]}"
        return f"{self._path}: record {index} ({name}, offset {offset})"

    def number(self, index: int) -> int:
        return index

    def digest(self) -> str:
        labels = b"" if self._labels is None else self._labels.tobytes()
        return hashlib.sha256(self._index.digest(self._file.size).encode() + labels).hexdigest()

    def _label(self, index: int) -> int:
        if self._labels is not None:
            return int(self._labels[index])
        return int(np.searchsorted(self._index.ends, index, "right"))


def open_tar(source: SampleSource) -> TarReader:
    try:
        file = DataFile(source.path)
        index = tar_index.open_index(file, source.index or stored_index.path(source.path), source.warn)
    except Damaged as error:
        raise UserError(f"{source.path}: {error}") from None
    if index.classes != ("",):
        return TarReader(source.path, file, index, index.classes)
    return _validation(source, file, index)


def _validation(source: SampleSource, file: DataFile, index: TarIndex) -> TarReader:
    known = devkit.read(devkit.find(source.devkit, source.path))
    lowest, highest, last = int(index.numbers.min()), int(index.numbers.max()), len(known.labels)
    if lowest < 1 or highest > last:
        raise UserError(
            f"{source.path}: it has images of number {lowest} to {highest}, and the devkit labels for 1 to {last}; "
            "expected names such as ILSVRC2012_val_00000001.JPEG: give the devkit of these images"
        )
    return TarReader(source.path, file, index, known.synsets, known.labels[index.numbers.astype(np.int64) - 1])


FORMAT = Format(
    "the archives of ILSVRC2012: .tar of a .tar of images for each class, or of images that a devkit labels",
    lambda path: path.suffix == ".tar",
    open_tar,
)
