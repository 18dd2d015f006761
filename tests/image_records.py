"""Small files of real JPEGs, made for a test."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from dmltrain.data.readers.record_writer import RecordWriter

CLASSES = 4


def jpeg(number: int, label: int) -> bytes:
    """A picture of a size of its own; its brightness tells the label."""
    rng = np.random.default_rng(number)
    size = (20 + number % 13, 20 + number % 7, 3)
    pixels = np.full(size, 30 + 60 * label) + rng.integers(-20, 20, size)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def write(
    path: Path, numbers: Iterable[int], change: Callable[[int, bytes], bytes] = lambda number, image: image
) -> Path:
    """A .rec with these pictures; picture n has label n % CLASSES. `change(number, image)`: damage."""
    writer = RecordWriter(path)
    for number in numbers:
        writer.write(float(number % CLASSES), number, change(number, jpeg(number, number % CLASSES)))
    writer.finish()
    return path
