"""The index of a tar archive of images, or of an archive that has one such archive for each class.

It is made once, from the headers, and kept beside the archive: an archive of 138 GB has a header every 110 KB.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.readers import image_file, sampled, stored_index, tar
from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data.readers.stored_index import StoredIndex

NUMBER = re.compile(rb"([0-9]{1,9})\.[^.]*$")  # in n01440764_10026.JPEG, ILSVRC2012_val_00000001.JPEG
COLUMNS = {"offsets": "<i8", "sizes": "<u4", "numbers": "<u4"}


@dataclass(frozen=True, eq=False)
class TarIndex:
    """Images by class, in the order of the classes' names, and within a class in that of the archive. classes: names of
    the inner archives; one "" if there are none. ends: where each class ends. numbers: those in the images' names."""

    classes: tuple[str, ...]
    ends: Array  # int64 (classes,)
    offsets: Array  # int64 (n,)
    sizes: Array  # uint32 (n,)
    numbers: Array  # uint32 (n,)

    def digest(self, size: int) -> str:
        """sha256 of the archive's size and the whole index."""
        digest = hashlib.sha256(" ".join([str(size), *self.classes]).encode(errors="surrogateescape"))
        for column in (self.ends, self.offsets, self.sizes, self.numbers):
            digest.update(column.data)
        return digest.hexdigest()


class _Class:
    """The images of one class that were found so far."""

    def __init__(self) -> None:
        self.offsets, self.sizes, self.numbers = array("q"), array("I"), array("I")


def scan(file: DataFile, warn: Callable[[str], None]) -> TarIndex:
    """Raises Damaged."""
    classes: dict[str, _Class] = {}
    others: list[bytes] = []
    for outer in tar.members(file):
        if not outer.name.endswith(b".tar"):
            _add(classes.setdefault("", _Class()), outer, others)
            continue
        name = Path(outer.name.decode("utf-8", "surrogateescape")).stem
        if name in classes:
            raise Damaged(f"has two archives of the class {name}: expected one for each class")
        classes[name] = _Class()
        try:
            for inner in tar.members(file, outer.offset, outer.offset + outer.size):
                _add(classes[name], inner, others)
        except Damaged as error:
            raise Damaged(f"{name}.tar in it: {error}") from None
    if others:
        first = others[0].decode(errors="replace")
        warn(f"{file.name}: {len(others)} files without the name of an image are not read ({first} ...)")
    if "" in classes and len(classes) > 1 and not classes[""].offsets:
        del classes[""]
    return _index(classes)


def _add(to: _Class, image: tar.TarMember, others: list[bytes]) -> None:
    if not image_file.is_image(image.name):
        others.append(image.name)
        return
    if image.size >= image_file.MAX_BYTES:
        raise Damaged(
            f"{image.name[:80]!r} has {image.size} bytes, expected an image of less than {image_file.MAX_BYTES}"
        )
    to.offsets.append(image.offset)
    to.sizes.append(image.size)
    to.numbers.append(_number(image.name))


def _number(name: bytes) -> int:
    match = NUMBER.search(name)
    return int(match[1]) if match else 0


def _index(classes_by_name: dict[str, _Class]) -> TarIndex:
    classes = sorted(classes_by_name)
    if "" in classes_by_name and len(classes) > 1:
        raise Damaged("has images beside the archives of its classes, expected one of the two")
    if missing := [name or "it" for name in classes if not classes_by_name[name].offsets]:
        raise Damaged(f"has no image in {len(missing)} of its {len(classes)} archives: {', '.join(missing[:5])}")
    if not classes:
        raise Damaged("has no images")
    columns = {
        name: np.concatenate([np.frombuffer(getattr(classes_by_name[class_], name), kind) for class_ in classes])
        for name, kind in COLUMNS.items()
    }
    return TarIndex(tuple(classes), np.cumsum([len(classes_by_name[name].offsets) for name in classes]), **columns)


def open_index(file: DataFile, path: Path, warn: Callable[[str], None]) -> TarIndex:
    """The index that is kept at `path`, if it is this archive's; else it is made and kept there. Raises Damaged."""
    if path.exists():
        try:
            return _from_stored(stored_index.load(path), file)
        except Damaged as error:
            warn(f"{path}: {error}; it is made again")
    index = scan(file, warn)
    facts = {"size": file.size, "classes": index.classes}
    arrays = {"ends": index.ends, **{name: getattr(index, name) for name in COLUMNS}}
    try:
        stored_index.save(path, StoredIndex(facts, arrays))
    except OSError as error:
        warn(f"{path}: cannot be written: {error.strerror or error}; the next start reads all headers again")
    return index


def _from_stored(stored: StoredIndex, file: DataFile) -> TarIndex:
    """Raises Damaged if it is not the index of this archive."""
    classes, size, arrays = stored.facts.get("classes"), stored.facts.get("size"), stored.arrays
    if size != file.size or {name: array.dtype.str for name, array in arrays.items()} != {"ends": "<i8", **COLUMNS}:
        raise Damaged(f"it is the index of an archive of {size} bytes, and {file.name} has {file.size}")
    ends, lengths = arrays["ends"], {len(arrays[name]) for name in COLUMNS}
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise Damaged("it has no names of classes")
    if not len(classes) == len(ends) > 0 or lengths != {int(ends[-1])} or (np.diff(ends, prepend=0) <= 0).any():
        raise Damaged("its arrays do not fit together")
    index = TarIndex(tuple(classes), **arrays)
    for place in sampled.places(int(ends[-1])):
        offset = int(index.offsets[place]) - tar.BLOCK
        name, length, _ = tar.header(file.read(offset, tar.BLOCK), offset)
        if length != index.sizes[place] or _number(name) not in (index.numbers[place], 0):  # 0: a name that was cut
            raise Damaged(f"it is the index of another archive: record {place} is not at offset {offset}")
    return index
