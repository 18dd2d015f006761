"""Image files: which files are images, and how one is read whole."""

from __future__ import annotations

import os

from dmltrain.data.readers.data_file import Damaged, DataFile

SUFFIXES = frozenset(b".jpg .jpeg .png .bmp .gif .ppm .pgm .tif .tiff .webp".split())
MAX_BYTES = 1 << 29  # as many as a record of a .rec can have


def is_image(name: bytes) -> bool:
    """By its name. Hidden files are none: some programs leave copies with a dot in front."""
    return name[name.rfind(b".") :].lower() in SUFFIXES and not name.rpartition(b"/")[2].startswith(b".")


def read(path: bytes) -> bytes:
    """Raises Damaged."""
    file = DataFile(path)
    if file.size >= MAX_BYTES:
        raise Damaged(f"the file has {file.size} bytes, expected an image of less than {MAX_BYTES}")
    return file.read(0, file.size)


def size(path: bytes) -> int:
    """Its bytes. Raises Damaged if there is no such file."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise Damaged(f"cannot be opened: {error.strerror or error}") from None
