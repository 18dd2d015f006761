"""Several files or folders of samples as one: the records of the first, then those of the second, and so on."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence

from dmltrain.base.errors import UserError
from dmltrain.data.readers.reader import Reader, Record


class Joined:
    """Readers with the same classes, one after another."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = tuple(readers)
        self._ends = list(itertools.accumulate(len(reader) for reader in readers))
        self.class_names = readers[0].class_names
        for reader in self._readers:
            if reader.class_names != self.class_names:
                raise UserError(
                    f"{reader.where(0)}: its file has {_count(reader)}, and {self._readers[0].where(0)}: "
                    f"{_count(self._readers[0])}: the same label would mean two classes; give files with the same "
                    "classes"
                )

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> Record:
        reader, number = self._place(index)
        return reader.read(number)

    def where(self, index: int) -> str:
        reader, number = self._place(index)
        return reader.where(number)

    def number(self, index: int) -> int:
        return index

    def digest(self) -> str:
        return hashlib.sha256(" ".join(reader.digest() for reader in self._readers).encode()).hexdigest()

    def _place(self, index: int) -> tuple[Reader, int]:
        which = bisect.bisect_right(self._ends, index)
        return self._readers[which], index - (self._ends[which - 1] if which else 0)


def _count(reader: Reader) -> str:
    names = reader.class_names
    return "no names of classes" if names is None else f"{len(names)} classes, the first {names[0]!r}"
