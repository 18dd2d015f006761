"""The devkit of ILSVRC2012: which class each validation image has.

data/ILSVRC2012_validation_ground_truth.txt has a number for each image, the ILSVRC2012_ID of its class. data/meta.mat
says which synset has which number; these numbers do not follow the synsets' names, as labels do.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.readers import mat_file, tar
from dmltrain.data.readers.data_file import Damaged, DataFile

META = "meta.mat"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
NAME = "ILSVRC2012_devkit_t12"
MAX_BYTES = 16 << 20  # of the archive, packed and unpacked; it has 2.6 and 3.5 MB
GZIP = 31  # zlib's number for a stream with gzip's header


class Devkit(NamedTuple):
    """synsets: in the order of their names. labels: int32, for each image the place of its synset among them."""

    synsets: tuple[str, ...]
    labels: Array


class _Unpacked:
    """An archive in memory, as a file that is read at offsets."""

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def read(self, offset: int, count: int) -> bytes:
        return self._content[offset : offset + count]


def find(given: Path | None, images: Path) -> Path:
    """The devkit that is given, or that which lies beside the images. UserError: there is none."""
    for path in [given] if given else [images.with_name(NAME + ".tar.gz"), images.with_name(NAME)]:
        if path.exists():
            return path
    raise UserError(
        f"{given or images.with_name(NAME + '.tar.gz')}: no such file or folder; it has the labels of {images.name}: "
        f"put {NAME}.tar.gz there, or give its path"
    )


def read(path: Path) -> Devkit:
    """From the archive, or from the folder that it unpacks to. UserError: it is damaged."""
    try:
        files = _folder(path) if path.is_dir() else _archive(path)
        return Devkit(*_labels(_synsets(files[META]), files[TRUTH]))
    except Damaged as error:
        raise UserError(f"{path}: {error}; download {NAME}.tar.gz again") from None


def _folder(path: Path) -> dict[str, bytes]:
    contents = {}
    for name in (META, TRUTH):
        file = DataFile(
            next((file for file in (path / "data" / name, path / name) if file.exists()), path / "data" / name)
        )
        if file.size > MAX_BYTES:
            raise Damaged(f"data/{name} has {file.size} bytes, expected at most {MAX_BYTES}")
        contents[name] = file.read(0, file.size)
    return contents


def _archive(path: Path) -> dict[str, bytes]:
    file = DataFile(path)
    if file.size > MAX_BYTES:
        raise Damaged(f"has {file.size} bytes, expected at most {MAX_BYTES}")
    try:
        archive = _Unpacked(zlib.decompressobj(GZIP).decompress(file.read(0, file.size), MAX_BYTES))
    except zlib.error as error:
        raise Damaged(f"not an archive that gzip packed: {error}") from None
    contents = {}
    for member in tar.members(archive):
        name = member.name.rpartition(b"/")[2].decode(errors="replace")
        if name in (META, TRUTH):
            contents[name] = archive.read(member.offset, member.size)
    if missing := {META, TRUTH} - set(contents):
        raise Damaged(f"{', '.join(sorted(missing))} missing in it")
    return contents


def _synsets(content: bytes) -> dict[int, str]:
    """ILSVRC2012_ID -> WNID of the classes. The others in meta.mat are groups of classes, and have children."""
    try:
        rows: list[Mapping[str, Any]] = mat_file.read(content)["synsets"]
        classes = [row for row in rows if not int(row["num_children"][0])]
        synsets = {int(row["ILSVRC2012_ID"][0]): str(row["WNID"]) for row in classes}
    except (Damaged, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise Damaged(f"{META} has no synsets with ILSVRC2012_ID, WNID and num_children: {error}") from None
    if not synsets or len(set(synsets.values())) != len(classes):
        raise Damaged(f"{META} has {len(classes)} classes and {len(synsets)} numbers for them, expected the same")
    return synsets


def _labels(synsets: Mapping[int, str], truth: bytes) -> tuple[tuple[str, ...], Array]:
    names = sorted(synsets.values())
    places = {name: place for place, name in enumerate(names)}
    labels = []
    for number, line in enumerate(truth.split(), 1):
        known = synsets.get(int(line)) if line.isdigit() and len(line) < 10 else None
        if known is None:
            raise Damaged(f"line {number} of {TRUTH} is {line[:20]!r}, expected a class's ILSVRC2012_ID in {META}")
        labels.append(places[known])
    return tuple(names), np.array(labels, np.int32)
