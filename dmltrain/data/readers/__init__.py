"""Formats of images with labels: random access to records, wherever they are stored. Nothing is unpacked.

    reader = open_reader("train.rec")
    record = reader.read(17)  # labels, and an encoded image or pixels

A new format is one file with a `FORMAT` and one row in FORMATS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.data.readers import image_folder, image_list, leveldb_reader, lmdb_reader, record_reader, tar_reader
from dmltrain.data.readers.joined import Joined
from dmltrain.data.readers.reader import Format, Reader, Record, SampleSource

__all__ = ["FORMATS", "Format", "Reader", "Record", "SampleSource", "open_reader"]

LOG = logging.getLogger("dmltrain.data")
FORMATS: tuple[Format, ...] = (
    record_reader.FORMAT,
    image_list.FORMAT,
    tar_reader.FORMAT,
    lmdb_reader.FORMAT,
    leveldb_reader.FORMAT,
    image_folder.FORMAT,
)


def open_reader(
    paths: str | Path | Sequence[str | Path],
    *,
    index: str | Path | None = None,
    root: str | Path | None = None,
    devkit: str | Path | None = None,
    warn: Callable[[str], None] = LOG.warning,
) -> Reader:
    """A reader of one file or folder, or of several one after another; `SampleSource` explains the other arguments.

    UserError: a missing, unknown or damaged file, with the fix.
    """
    every = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not every:
        raise UserError("no file or folder of samples is given: expected at least one")
    if index is not None and len(every) > 1:
        raise UserError(f"the index {index} is given for {len(every)} files: expected one file, or no index")
    named = {"index": _path(index), "root": _path(root), "devkit": _path(devkit)}
    readers = [_open(SampleSource(path, **named, warn=warn)) for path in every]
    return readers[0] if len(readers) == 1 else Joined(readers)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _open(source: SampleSource) -> Reader:
    if not source.path.exists():
        raise UserError(f"{source.path}: no such file or folder")
    for row in FORMATS:
        if row.recognises(source.path):
            return row.open(source)
    raise UserError(f"{source.path}: unknown format; expected one of: {'; '.join(row.name for row in FORMATS)}")
