"""A .lst file, as im2rec makes and reads it: lines of number, label or labels, and path of an image, with tabs between.

Paths start from the folder `root`. Only where each line begins is kept in memory; a line is read with its image.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.readers import image_file, sampled
from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data.readers.reader import Format, Record, SampleSource

CHUNK = 1 << 22  # bytes that are read at once
MAX_LINE = 1 << 16  # bytes; a path has at most 4,096
LINE_FEED = ord("\n")
LARGEST = float(np.finfo(np.float32).max)
LARGEST_NUMBER = 10**18 - 1  # that the .idx of a .rec can have


class Malformed(Damaged):
    """A line that is not one of a list."""


class ListReader:
    """starts: int64 (n + 1,), where each line begins, and the end of the file. root: folder of the paths."""

    class_names = None

    def __init__(self, path: Path, file: DataFile, starts: Array, root: Path) -> None:
        self._path, self._file, self._starts, self._root = path, file, starts, root

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, index: int) -> Record:
        try:
            _, labels, path = self._line(index)
            return Record(labels, image_file.read(path))
        except Damaged as error:
            raise UserError(f"{self.where(index)}: {error}") from None

    def where(self, index: int) -> str:
        offset = int(self._starts[index])
        try:
            shown = os.path.relpath(self._line(index)[2], os.fsencode(self._root)).decode(errors="replace")
        except Damaged:
            return f"{self._path}: record {index} (offset {offset})"
        return f"{self._path}: record {index} (offset {offset}, {shown} in {self._root})"

    def number(self, index: int) -> int:
        try:
            number = self._line(index)[0]
        except Damaged as error:
            raise UserError(f"{self.where(index)}: {error}") from None
        if not 0 <= number <= LARGEST_NUMBER:
            raise UserError(f"{self.where(index)}: its number is {number}, expected 0 to {LARGEST_NUMBER}")
        return number

    def digest(self) -> str:
        """sha256 of the list, and the sizes of some files."""
        digest = hashlib.sha256()
        for _, text in _texts(self._file):
            digest.update(text)
        for size in self.sizes():
            digest.update(b"%d " % size)
        return digest.hexdigest()

    def sizes(self) -> list[int]:
        """The sizes of some of the files. UserError: one of them is missing."""
        sizes_of_images = []
        for index in sampled.places(len(self)):
            try:
                sizes_of_images.append(image_file.size(self._line(index)[2]))
            except Malformed as error:
                raise UserError(f"{self.where(index)}: {error}") from None
            except Damaged as error:
                raise UserError(
                    f"{self.where(index)}: {error}; is {self._root} the folder that the paths in the list start from?"
                ) from None
        return sizes_of_images

    def _line(self, index: int) -> tuple[int, Array, bytes]:
        """Number, labels and path of the image."""
        start = int(self._starts[index])
        line = self._file.read(start, int(self._starts[index + 1]) - start).strip()
        fields = [field.strip() for field in line.split(b"\t")]
        try:
            number = int(fields[0])
            labels = [float(label) for label in fields[1:-1]]
            if not labels or not all(abs(label) <= LARGEST for label in labels) or not fields[-1] or b"\0" in line:
                raise ValueError
        except ValueError:
            reason = "; the file begins with a byte order mark" if line.startswith(codecs.BOM_UTF8) else ""
            reason = reason or ("; the line has no tabs" if b"\t" not in line else "")
            raise Malformed(f"{line[:60]!r}, expected number, label and path with tabs between{reason}") from None
        return number, np.array(labels, np.float32), os.path.join(os.fsencode(self._root), fields[-1])


def open_list(source: SampleSource) -> ListReader:
    try:
        file = DataFile(source.path)
        reader = ListReader(source.path, file, _starts(file), source.root or source.path.parent)
    except Damaged as error:
        raise UserError(f"{source.path}: {error}") from None
    reader.sizes()
    return reader


def _starts(file: DataFile) -> Array:
    """Where each line begins that is not empty, and the end of the file."""
    starts = np.empty(sum(text.count(b"\n") for _, text in _texts(file)) + 2, np.int64)
    starts[0], filled = 0, 1
    for place, text in _texts(file):
        feeds = np.flatnonzero(np.frombuffer(text, np.uint8) == LINE_FEED)
        starts[filled : filled + len(feeds)] = feeds + (place + 1)
        filled += len(feeds)
    if starts[filled - 1] < file.size:  # no line feed at the end
        starts[filled] = file.size
        filled += 1
    starts = starts[:filled]
    kept = _not_empty(starts)
    return starts if kept.all() else np.append(starts[:-1][kept], file.size)


def _not_empty(starts: Array) -> Array:
    """Which lines have more than a line feed, maybe after a carriage return. Raises Damaged."""
    lengths = np.diff(starts)
    if not lengths.size or lengths.max() <= 2:
        raise Damaged("has no lines, expected number, label and path with tabs between")
    if lengths.max() > MAX_LINE:
        line = int(lengths.argmax())
        raise Damaged(f"line {line + 1} has {lengths[line]} bytes, expected at most {MAX_LINE}: no list of images")
    return np.asarray(lengths > 2)


def _texts(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """The file in pieces, each with its offset."""
    for place in range(0, file.size, CHUNK):
        yield place, file.read(place, min(CHUNK, file.size - place))


FORMAT = Format("a list of images: .lst", lambda path: path.suffix == ".lst", open_list)
