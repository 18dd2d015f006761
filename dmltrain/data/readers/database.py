"""What Caffe's LMDB and LEVELDB have in common: Datums, each with a key.

Caffe's converters write keys that begin with the number of the image, in eight digits (convert_imageset) or five
(CIFAR-10). Where each number from 0 on has a key, record i is found by the number alone; else all keys are in memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dmltrain.base.errors import UserError
from dmltrain.data.readers import datum, sampled
from dmltrain.data.readers.compact_names import CompactNames
from dmltrain.data.readers.data_file import Damaged
from dmltrain.data.readers.reader import Record

TEXTS = b"num-samples"  # a key in databases of programs that read text
DIGITS = re.compile(rb"[0-9]{5,18}")


class DatabaseKeys(Protocol):
    """How the key of a record is found."""

    def __len__(self) -> int: ...

    def start(self, index: int) -> bytes:
        """What the key of this record begins with; no other key does."""


@dataclass(frozen=True)
class NumberedKeys:
    """Keys that begin with the numbers 0 to count - 1, in `width` digits."""

    count: int
    width: int

    def __len__(self) -> int:
        return self.count

    def start(self, index: int) -> bytes:
        return b"%0*d" % (self.width, index)


@dataclass(frozen=True, eq=False)
class ListedKeys:
    """Any keys, in the order of the database."""

    names: CompactNames

    def __len__(self) -> int:
        return len(self.names)

    def start(self, index: int) -> bytes:
        return self.names[index]


def width(first: bytes) -> int:
    """Digits of the number that the first key begins with; 0 if that is not 0 in five or more digits."""
    digits = DIGITS.match(first)
    return len(digits[0]) if digits and not int(digits[0]) else 0


class DatabaseReader:
    """find(start) gives the first key that is not less, and its value; None if there is none. It raises Damaged."""

    class_names = None

    def __init__(self, path: Path, keys: DatabaseKeys, find: Callable[[bytes], tuple[bytes, bytes] | None]) -> None:
        self._path, self._keys, self._find = path, keys, find

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int) -> Record:
        try:
            return datum.read(self._stored(index)[1])
        except Damaged as error:
            raise UserError(f"{self.where(index)}: {error}") from None

    def where(self, index: int) -> str:
        return f"{self._path}: record {index} (key {self._keys.start(index).decode(errors='replace')})"

    def number(self, index: int) -> int:
        return index

    def digest(self) -> str:
        """sha256 of the count, and of some records."""
        digest = hashlib.sha256(b"%d" % len(self))
        for index in sampled.places(len(self)):
            try:
                key, value = self._stored(index)
            except Damaged as error:
                raise UserError(f"{self.where(index)}: {error}") from None
            digest.update(b"%d %d " % (len(key), len(value)) + key + value)
        return digest.hexdigest()

    def check(self) -> None:
        """UserError: the records are no Datums, but those of another program."""
        try:
            if self._has(TEXTS) and self._has(b"image-"):
                raise datum.Foreign(
                    "its keys (image-..., label-..., num-samples) are those of another program's database, for text "
                    "recognition; expected Caffe's, of Datums"
                )
            datum.read(self._stored(0)[1])
        except datum.Foreign as error:
            raise UserError(f"{self.where(0)}: {error}") from None
        except Damaged:
            pass  # the record is reported when it is needed

    def _has(self, start: bytes) -> bool:
        """Whether a key begins so."""
        pair = self._find(start)
        return pair is not None and pair[0].startswith(start)

    def _stored(self, index: int) -> tuple[bytes, bytes]:
        start = self._keys.start(index)
        pair = self._find(start)
        if pair is None or not pair[0].startswith(start):
            following = "none follows" if pair is None else f"{pair[0][:60]!r} follows"
            raise Damaged(f"there is no key that begins so, and {following}; {datum.AGAIN}")
        return pair


def checked(reader: DatabaseReader) -> DatabaseReader:
    """The reader. UserError: its records are another program's."""
    reader.check()
    return reader
