"""Caffe's Datum (src/caffe/proto/caffe.proto), a protocol buffer: an image, as pixels or an encoded file, and a label.

Fields: 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded. Pixels are planes (C, H, W), and of
three planes the first is blue.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.readers.data_file import Damaged
from dmltrain.data.readers.reader import Record

CHANNELS, HEIGHT, WIDTH, DATA, LABEL, FLOAT_DATA, ENCODED = range(1, 8)
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5  # types on the wire
AGAIN = "the database is damaged; copy or make it again"


class Foreign(Damaged):
    """No Datum, but what another program writes."""


def read(content: bytes) -> Record:
    """The label, and an encoded image or pixels uint8 (H, W, 3) RGB. Raises Damaged."""
    numbers = dict.fromkeys((CHANNELS, HEIGHT, WIDTH, LABEL, ENCODED), 0)
    data, floats = b"", []
    for field, kind, value in _fields(content):
        if field == CHANNELS and kind == BYTES:
            raise Foreign(
                "it is no Datum, but has another message in its first field, as an AnnotatedDatum of Caffe's SSD (an "
                "image with boxes) and TensorProtos of Caffe2 have; expected a Datum of an image and its class"
            )
        if field in numbers and isinstance(value, int):
            numbers[field] = value
        elif field == DATA and isinstance(value, bytes):
            data = value
        elif field == FLOAT_DATA and kind in (BYTES, FOUR_BYTES) and isinstance(value, bytes):
            floats.append(value)
    labels = np.array([_signed(numbers[LABEL])], np.float32)
    if numbers[ENCODED]:
        return Record(labels, data)
    shape = (numbers[CHANNELS], numbers[HEIGHT], numbers[WIDTH])
    return Record(labels, _pixels(shape, data, b"".join(floats)))


def _signed(value: int) -> int:
    """An int32 as it is written: negative ones as 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _pixels(shape: tuple[int, int, int], data: bytes, floats: bytes) -> Array:
    if floats and not data:
        if len(floats) % 4:
            raise Damaged(f"its float_data have {len(floats)} bytes, expected a multiple of 4; {AGAIN}")
        values = np.frombuffer(floats, "<f4")
        pixels = values.astype(np.uint8, casting="unsafe") if _bytes_in(values) else None
        if pixels is None:
            raise Damaged("its float_data are not all whole numbers from 0 to 255: they are no pixels; make it again")
    else:
        pixels = np.frombuffer(data, np.uint8)
    channels, height, width = shape
    if channels not in (1, 3) or not height or not width or channels * height * width != pixels.size:
        raise Damaged(
            f"its {pixels.size} pixels are not {channels} planes of {height}x{width}, expected 1 or 3 planes of 1x1 or "
            f"more; {AGAIN}"
        )
    planes = pixels.reshape(shape)[::-1].transpose(1, 2, 0)
    return np.ascontiguousarray(np.broadcast_to(planes, (height, width, 3)))


def _bytes_in(values: Array) -> bool:
    inside = values[(values >= 0) & (values <= 255)]  # which leaves out what is no number, too
    return inside.size == values.size and bool((inside == np.floor(inside)).all())


def _fields(content: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, type and value of each field. Raises Damaged."""
    place = 0
    while place < len(content):
        tag, place = _varint(content, place)
        field, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, place = _varint(content, place)
            yield field, kind, value
            continue
        if kind == BYTES:
            size, place = _varint(content, place)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if kind == EIGHT_BYTES else 4
        else:
            raise Damaged(f"a field of type {kind} at its byte {place}, expected a Datum; {AGAIN}")
        if size > len(content) - place:
            raise Damaged(f"a field of {size} bytes at its byte {place} of {len(content)}; {AGAIN}")
        yield field, kind, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """The number at this place, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            break
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, place
    raise Damaged(f"a number at its byte {place} has no end; {AGAIN}")
