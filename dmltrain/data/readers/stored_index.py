"""Indexes that are expensive to compute are stored in a file: facts as one line of JSON, then arrays of numbers.

The line also has the name, type and length of each array. The bytes of the arrays follow in that order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmltrain.base import whole_file
from dmltrain.base.arrays import Array
from dmltrain.data.readers.data_file import Damaged, DataFile

FORMAT = "dmltrain index 1"
SUFFIX = ".index"  # after the whole name of the file or folder
MAX_LINE = 16 << 20  # bytes of the line: the 21,841 classes of ImageNet-22K have 0.3 MB
TYPES = ("<i8", "<u4", "|u1")


class StoredIndex(NamedTuple):
    """What an index consists of."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, Array]


def path(data: Path) -> Path:
    """Where the index of this file or folder is kept."""
    return data.with_name(data.name + SUFFIX)


def save(target: Path, index: StoredIndex) -> None:
    """Raises OSError if it cannot be written."""
    columns = [(name, array.dtype.newbyteorder("<").str, len(array)) for name, array in index.arrays.items()]
    line = json.dumps({"format": FORMAT, "arrays": columns, **index.facts}) + "\n"
    whole_file.write(target, (line.encode(), *(array.data.cast("B") for array in index.arrays.values())))


def load(source: Path) -> StoredIndex:
    """Raises Damaged."""
    file = DataFile(source)
    head = file.read(0, min(file.size, MAX_LINE))
    line, feed, _ = head.partition(b"\n")
    try:
        facts = json.loads(line)
        if not feed or facts.pop("format") != FORMAT:
            raise ValueError
        columns = [(str(name), TYPES.index(kind), int(length)) for name, kind, length in facts.pop("arrays")]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Damaged(f"does not begin with a line of an index of format {FORMAT!r}") from None
    del head
    return StoredIndex(facts, _arrays(file, len(line) + 1, columns))


def _arrays(file: DataFile, place: int, columns: list[tuple[str, int, int]]) -> dict[str, Array]:
    arrays = {}
    for name, kind, length in columns:
        dtype = np.dtype(TYPES[kind])
        if not 0 <= length <= (file.size - place) // dtype.itemsize:
            raise Damaged(f"has {file.size} bytes, not the {length} numbers of {name!r}: truncated")
        arrays[name] = np.frombuffer(file.read(place, length * dtype.itemsize), dtype)
        place += length * dtype.itemsize
    if place != file.size:
        raise Damaged(f"has {file.size} bytes, expected {place}")
    return arrays
