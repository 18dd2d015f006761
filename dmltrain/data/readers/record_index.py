"""The index of a .rec file: the offset and the key of each record, as arrays.

An .idx file (MXNet, python/mxnet/recordio.py) has a line `key<tab>offset` for each record. Records are numbered in the
order of their offsets, as dmlc-core's src/io/indexed_recordio_split.cc does, so that an index that was rebuilt from the
.rec gives the same order. The same record may be listed several times.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.readers import recordio, sampled
from dmltrain.data.readers.data_file import Damaged, DataFile

CHUNK = 1 << 22  # bytes of an .idx that are parsed at once
LINES = 1 << 16  # that are written at once
LINE = re.compile(rb"[0-9]{1,18}\t[0-9]{1,18}")  # int64 can hold 18 digits
TAB, LINE_FEED, ZERO, NINE = b"\t\n09"
REBUILD = "delete the index, and it is made again"


@dataclass(frozen=True, eq=False)
class RecordIndex:
    """offsets: int64 (n,), ascending. keys: unsigned (n,), None if they are 0 to n - 1."""

    offsets: Array
    keys: Array | None

    def key(self, index: int) -> int:
        return index if self.keys is None else int(self.keys[index])

    def digest(self, file: DataFile) -> str:
        """sha256 of the file's size, all offsets and keys, and the first bytes of some records."""
        digest = hashlib.sha256(f"{file.size} {len(self.offsets)}".encode())
        for column in (self.offsets, self.keys):
            digest.update(b"" if column is None else column.data)
        for place in sampled.places(len(self.offsets)):
            offset = int(self.offsets[place])
            digest.update(file.read(offset, min(recordio.HEAD.size + recordio.LABEL.size, file.size - offset)))
        return digest.hexdigest()


# -- reading an .idx --------------------------------------------------------------------------------------------------


def load(file: DataFile) -> RecordIndex:
    """The index in an .idx file. Raises Damaged.

    For 14 million records each column of 8 bytes is 112 MB, so that there is no copy more than needed.
    """
    keys: Array | None
    offsets, keys = _parsed(file)
    if np.array_equal(keys, np.arange(len(keys), dtype=keys.dtype)):
        keys = None
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets, kind="stable")
        offsets.sort()
        keys = order.astype(np.uint32) if keys is None else keys[order]
    return RecordIndex(offsets, keys)


def _parsed(file: DataFile) -> tuple[Array, Array]:
    """Offsets and keys in the order of the lines."""
    count = sum(text.count(b"\n") for text in _texts(file))
    if not count:
        raise Damaged(f"has no line, expected one with key, tab and offset for each record; {REBUILD}")
    offsets, keys, filled = np.empty(count, np.int64), np.empty(count, np.uint32), 0
    for text in _texts(file):
        some_keys, some_offsets = _columns(text, filled)
        if some_keys.max() > np.iinfo(keys.dtype).max:
            keys = keys.astype(np.uint64)
        end = filled + len(some_keys)
        keys[filled:end], offsets[filled:end] = some_keys, some_offsets
        filled = end
    return offsets, keys


def _texts(file: DataFile) -> Iterator[bytes]:
    """Whole lines, about CHUNK bytes at once; all end with a line feed."""
    rest = b""
    for start in range(0, file.size, CHUNK):
        lines, feed, rest = (rest + file.read(start, min(CHUNK, file.size - start))).rpartition(b"\n")
        if len(rest) > CHUNK:
            raise Damaged(f"the bytes before {start + CHUNK} are no lines of key, tab and offset; {REBUILD}")
        if feed:
            yield (lines + feed).replace(b"\r\n", b"\n")
    if rest:
        yield rest + b"\n"


def _columns(text: bytes, lines_before: int) -> tuple[Array, Array]:
    """Keys and offsets, int64, of whole lines."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((data < ZERO) | (data > NINE))
    separators = data[ends].reshape(-1, 2) if len(ends) % 2 == 0 else data[:0]
    if separators.size and (separators == (TAB, LINE_FEED)).all():
        starts = np.concatenate(([0], ends[:-1] + 1))
        lengths = ends - starts
        if lengths.min() > 0 and lengths.max() <= 18:
            return _values(data, starts[::2], lengths[::2]), _values(data, starts[1::2], lengths[1::2])
    for number, line in enumerate(text[:-1].split(b"\n"), lines_before + 1):
        if not LINE.fullmatch(line):
            raise Damaged(f"line {number} is {line[:60]!r}, expected a key, a tab and an offset; {REBUILD}")
    raise AssertionError("a line that only one of two parsers reads")


def _values(data: Array, starts: Array, lengths: Array) -> Array:
    """The decimal numbers (int64) of so many digits at these places."""
    values = np.zeros(len(starts), np.int64)
    for place in range(int(lengths.max())):
        longer = lengths > place
        np.multiply(values, 10, out=values, where=longer)
        np.add(values, data.take(starts + place, mode="clip") - ZERO, out=values, where=longer)
    return values


# -- comparing it with the .rec ---------------------------------------------------------------------------------------


def check(index: RecordIndex, file: DataFile) -> str:
    """Compare the index with its .rec: the first and the last record and some between must be where it says.

    Returns a warning if the .rec has records that the index does not list, else "". Raises Damaged.
    """
    if np.bitwise_or.reduce(index.offsets) % 4:
        raise Damaged(f"its offsets are not all multiples of 4: it is no index of {file.name}; {REBUILD}")
    first, last = int(index.offsets[0]), int(index.offsets[-1])
    unlisted = 0 if first and _starts_record(file, 0) else None
    for place in sampled.places(int(np.searchsorted(index.offsets, file.size))):
        end, following = _bounds(index, file, place)
        if end < following and _starts_record(file, end):
            unlisted = end
    if last >= file.size:
        raise Damaged(
            f"it lists record {len(index.offsets) - 1} at offset {last}, and {file.name} has {file.size} bytes: it is "
            f"truncated, so copy or pack it again; or, if this is the index of another file, {REBUILD}"
        )
    if unlisted is None:
        return ""
    return f"{file.name} has a record at offset {unlisted} that the index does not list; {REBUILD} with all records"


def _bounds(index: RecordIndex, file: DataFile, place: int) -> tuple[int, int]:
    """Where this record ends, and where the next in the index begins."""
    offset = int(index.offsets[place])
    after = int(np.searchsorted(index.offsets, offset, "right"))
    following = min(file.size, int(index.offsets[after]) if after < len(index.offsets) else file.size)
    where = f"it lists record {place} (key {index.key(place)}) at offset {offset}"
    try:
        end = recordio.extent(file, offset).end
    except Damaged as error:
        raise Damaged(
            f"{where}, where {file.name} has none: {error}; or, if it is the index of another file, {REBUILD}"
        ) from None
    if end > following:
        raise Damaged(
            f"{where} and the next at {following}, and the one in {file.name} ends at {end}: it is the index of "
            f"another file; {REBUILD}"
        )
    return end, following


def _starts_record(file: DataFile, offset: int) -> bool:
    try:
        recordio.extent(file, offset)
    except Damaged:
        return False
    return True


# -- making one -------------------------------------------------------------------------------------------------------


def scan(file: DataFile) -> RecordIndex:
    """The index of a .rec file, from its records' headers. Keys are their ids if no two are the same, as im2rec writes
    them, else 0 to n - 1. Raises Damaged."""
    offsets, ids, place = array("q"), array("Q"), 0
    try:
        for place, identity in records(file):
            offsets.append(place)
            ids.append(identity)
    except Damaged as error:
        raise Damaged(f"record {len(offsets)}: {error}") from None
    if not offsets:
        raise Damaged("has no records: the file is empty; pack it again")
    return RecordIndex(np.frombuffer(offsets, np.int64), _keys(np.frombuffer(ids, np.uint64)))


def records(file: DataFile) -> Iterator[tuple[int, int]]:
    """Offset and id of each record in turn. Raises Damaged at the first that is not whole."""
    place = 0
    while place < file.size:
        parts, end = recordio.extent(file, place)
        yield place, recordio.identity(file, parts[0])
        place = end


def _keys(ids: Array) -> Array | None:
    """None for 0 to n - 1, which is also used where two ids are the same or one has more than 18 digits."""
    ascending = np.sort(ids)
    if ascending[-1] >= 10**18 or (ascending[1:] == ascending[:-1]).any():
        return None
    if ascending[0] == 0 and ascending[-1] == len(ids) - 1 and np.array_equal(ascending, ids):
        return None
    return ids.astype(np.uint32) if ascending[-1] <= np.iinfo(np.uint32).max else ids


def text(index: RecordIndex) -> Iterator[bytes]:
    """The content of its .idx file, in pieces."""
    for start in range(0, len(index.offsets), LINES):
        offsets = index.offsets[start : start + LINES]
        keys = np.arange(start, start + len(offsets)) if index.keys is None else index.keys[start : start + LINES]
        yield b"%d\t%d\n" * len(offsets) % tuple(np.stack([keys.astype(np.int64), offsets], 1).ravel().tolist())
