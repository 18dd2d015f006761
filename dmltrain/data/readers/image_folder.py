"""A folder with one folder of images for each class, as torchvision's ImageFolder and im2rec --recursive read it.

Labels number the class folders in the order of their names (bytes, as `LC_ALL=C ls` sorts them). Images may lie in
folders within that of their class.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dmltrain.base.errors import UserError
from dmltrain.data.readers import compact_names, image_file, sampled
from dmltrain.data.readers.compact_names import CompactNames
from dmltrain.data.readers.data_file import Damaged
from dmltrain.data.readers.reader import Format, Record, SampleSource

MAX_DEPTH = 8  # folders within the folder of a class; a link to a folder above it would have no end


class FolderReader:
    """classes: names of their folders. files: paths within the folder of the class. counts: how many each class has."""

    def __init__(self, folder: Path, classes: list[bytes], files: CompactNames, counts: list[int]) -> None:
        self._folder, self._classes, self._files = folder, classes, files
        self._ends = np.cumsum(counts)
        self.class_names = tuple(map(_shown, classes))

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> Record:
        label, path = self._place(index)
        try:
            image = image_file.read(os.path.join(os.fsencode(self._folder), path))
        except Damaged as error:
            raise UserError(f"{self.where(index)}: {error}") from None
        return Record(np.array([label], np.float32), image)

    def where(self, index: int) -> str:
        return f"{self._folder}: record {index} ({_shown(self._place(index)[1])})"

    def number(self, index: int) -> int:
        return index

    def digest(self) -> str:
        """sha256 of all names, and the sizes of some files."""
        digest = hashlib.sha256(b"\0".join(self._classes))
        digest.update(self._files.content)
        for column in (self._ends, self._files.ends):
            digest.update(column.data)
        for index in sampled.places(len(self)):
            try:
                size = image_file.size(os.path.join(os.fsencode(self._folder), self._place(index)[1]))
            except Damaged as error:
                raise UserError(f"{self.where(index)}: {error}") from None
            digest.update(b"%d " % size)
        return digest.hexdigest()

    def _place(self, index: int) -> tuple[int, bytes]:
        """Label and path within the folder."""
        label = int(np.searchsorted(self._ends, index, "right"))
        return label, os.path.join(self._classes[label], self._files[index])


def open_folder(source: SampleSource) -> FolderReader:
    folder = os.fsencode(source.path)
    try:
        classes = _classes(folder)
        counts: list[int] = []
        ignored: list[bytes] = []
        files = compact_names.collect(_all_images(folder, classes, counts, ignored))
    except (Damaged, OSError) as error:
        raise UserError(f"{source.path}: {error}") from None
    if missing := [_shown(name) for name, count in zip(classes, counts, strict=True) if not count]:
        raise UserError(
            f"{source.path}: no image in {len(missing)} of {len(classes)} class folders: {', '.join(missing[:5])}; "
            "expected images in each, because each has a label: put images into it or remove it"
        )
    if ignored:
        first = _shown(ignored[0])
        source.warn(f"{source.path}: {len(ignored)} files without the name of an image are not read ({first} ...)")
    return FolderReader(source.path, classes, files, counts)


def _classes(folder: bytes) -> list[bytes]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(b".")]
    classes = sorted(entry.name for entry in visible if entry.is_dir())
    if not classes:
        raise Damaged("has no folders, expected one folder of images for each class, or give a .lst of the images")
    if loose := sorted(entry.name for entry in visible if image_file.is_image(entry.name) and not entry.is_dir()):
        raise Damaged(
            f"has {len(loose)} images beside its class folders, the first {_shown(loose[0])}; move them into the "
            "folder of their class"
        )
    return classes


def _all_images(folder: bytes, classes: list[bytes], counts: list[int], ignored: list[bytes]) -> Iterator[bytes]:
    """Class by class; adds each class's count to `counts`, and paths of other files to `ignored`."""
    for name in classes:
        images: list[bytes] = []
        others: list[bytes] = []
        _list(os.path.join(folder, name), b"", images, others, MAX_DEPTH)
        ignored += [os.path.join(name, other) for other in others]
        counts.append(len(images))
        yield from sorted(images)


def _list(folder: bytes, before: bytes, images: list[bytes], others: list[bytes], depth: int) -> None:
    if not depth:
        raise Damaged(f"{_shown(folder)} lies {MAX_DEPTH} folders deep in its class, expected less: a link upwards?")
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(b"."):
                continue
            if entry.is_dir():
                _list(entry.path, before + name + b"/", images, others, depth - 1)
            else:
                (images if image_file.is_image(name) else others).append(before + name)


def _shown(name: bytes) -> str:
    return name.decode(errors="replace")


FORMAT = Format("a folder with one folder of images for each class", Path.is_dir, open_folder)
