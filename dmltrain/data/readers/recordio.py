"""RecordIO, the format of MXNet's .rec files: records one after another, each with labels and an encoded image.

A record (dmlc-core, src/recordio.cc) is one part, or several where its content has the magic number at a multiple of
four bytes: the content is cut there, and the reader puts the magic number back. A part: uint32 magic number, uint32
flag << 29 | length, the content, and zeros up to a multiple of four bytes. Flags: 0 whole, 1 first, 2 middle, 3 last.

The content (MXNet, src/io/image_recordio.h): uint32 count of labels, float32 label, uint64 id, uint64 second id; if the
count is not 0 so many float32 labels; then the encoded image. All numbers are little-endian.
"""

from __future__ import annotations

import numbers
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data.readers.reader import Record

MAGIC_NUMBER = 0xCED7230A
MAGIC = struct.pack("<I", MAGIC_NUMBER)
HEAD = struct.Struct("<II")  # of a part: magic number, flag << 29 | length
LABEL = struct.Struct("<IfQQ")  # count of further labels, label, id, second id
MAX_BYTES = 1 << 29  # a record has fewer: 29 bits have its length
MAX_PARTS = 1 << 16  # of a record: bounds the list of them; four bytes of an image are rarely the magic number
WHOLE, FIRST, MIDDLE, LAST = range(4)
FOLLOWING = {None: (WHOLE, FIRST), FIRST: (MIDDLE, LAST), MIDDLE: (MIDDLE, LAST)}  # flag -> flags of the next part
AGAIN = "the file is damaged; copy or pack it again"


class Extent(NamedTuple):
    """Where a record lies: offset and length of each part's content, and the offset of the next record."""

    parts: list[tuple[int, int]]
    end: int


def extent(file: DataFile, offset: int) -> Extent:
    """The record at `offset`, which lies within the file. Raises Damaged."""
    parts: list[tuple[int, int]] = []
    flag, end, total = None, offset, 0
    while flag not in (WHOLE, LAST):
        if file.size - end < HEAD.size:
            raise Damaged(f"the file ends at {file.size}, expected a record at offset {end}: it is truncated; {AGAIN}")
        magic, word = HEAD.unpack(file.read(end, HEAD.size))
        flag, length = _checked(file, end, magic, word, FOLLOWING[flag])
        parts.append((end + HEAD.size, length))
        end += HEAD.size + padded(length)
        total += length + len(MAGIC)
        if len(parts) > MAX_PARTS:
            raise Damaged(f"it has more than {MAX_PARTS} parts; {AGAIN}")
        if total >= MAX_BYTES + len(MAGIC):
            raise Damaged(f"its parts have {total} bytes and more, expected less than {MAX_BYTES}; {AGAIN}")
    return Extent(parts, end)


def _checked(file: DataFile, offset: int, magic: int, word: int, flags: tuple[int, int]) -> tuple[int, int]:
    """Flag and length of a part, once they can be right."""
    flag, length = word >> 29, word & (MAX_BYTES - 1)
    if magic != MAGIC_NUMBER:
        raise Damaged(f"{magic:#010x} at offset {offset}, expected the magic number {MAGIC_NUMBER:#010x}; {AGAIN}")
    if flag not in flags:
        raise Damaged(f"flag {flag} at offset {offset}, expected {flags[0]} or {flags[1]}; {AGAIN}")
    left = file.size - offset - HEAD.size
    if padded(length) > left:
        raise Damaged(
            f"the header at offset {offset} claims {length} bytes, and {left} follow: it is truncated or "
            "damaged; copy or pack it again"
        )
    return flag, length


def padded(length: int) -> int:
    return -(-length // 4) * 4


def read(file: DataFile, offset: int) -> Record:
    """Labels and encoded image of the record at `offset`. Raises Damaged."""
    contents = [file.read(*part) for part in extent(file, offset).parts]
    return unpack(contents[0] if len(contents) == 1 else MAGIC.join(contents))


def unpack(content: bytes) -> Record:
    """Raises Damaged if the content has not the labels that it should have."""
    if len(content) < LABEL.size:
        raise Damaged(f"its content has {len(content)} bytes, expected a header of {LABEL.size} and an image; {AGAIN}")
    count, label, _, _ = LABEL.unpack_from(content)
    if not count:
        return Record(np.array([label], np.float32), content[LABEL.size :])
    end = LABEL.size + 4 * count
    if len(content) < end:
        raise Damaged(f"its content has {len(content)} bytes, and its {count} labels alone need {end}; {AGAIN}")
    labels = np.frombuffer(content, "<f4", count, LABEL.size).astype(np.float32)
    return Record(labels, content[end:])


def pack(labels: float | Sequence[float], key: int, image: bytes) -> bytes:
    """The content of a record: one label as a number, or any count of them; the image as an encoded file."""
    if isinstance(labels, numbers.Real):
        return LABEL.pack(0, labels, key, 0) + image
    row = np.asarray(labels, "<f4")
    return LABEL.pack(row.size, 0.0, key, 0) + row.tobytes() + image


def encode(content: bytes) -> Iterator[bytes]:
    """The bytes of a record in a .rec file, in pieces. ValueError: more than a record can have."""
    if len(content) >= MAX_BYTES:
        raise ValueError(f"a record of {len(content)} bytes, expected less than {MAX_BYTES}")
    start, place = 0, content.find(MAGIC)
    while place >= 0:
        if place % 4 == 0:
            yield HEAD.pack(MAGIC_NUMBER, (MIDDLE if start else FIRST) << 29 | place - start)
            yield content[start:place]
            start = place + len(MAGIC)
        place = content.find(MAGIC, place + 1)
    yield HEAD.pack(MAGIC_NUMBER, (LAST if start else WHOLE) << 29 | len(content) - start)
    yield content[start:]
    yield bytes(-len(content) % 4)


def identity(file: DataFile, part: tuple[int, int]) -> int:
    """The id in the header of a record whose first part this is; 0 if the part has no whole header."""
    offset, length = part
    if length < LABEL.size:
        return 0
    number: int = LABEL.unpack(file.read(offset, LABEL.size))[2]
    return number
