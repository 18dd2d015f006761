"""Caffe's LMDB: a folder with data.mdb, whose values are Datums."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.data.readers import compact_names, database
from dmltrain.data.readers.data_file import Damaged
from dmltrain.data.readers.database import DatabaseKeys, DatabaseReader, ListedKeys, NumberedKeys
from dmltrain.data.readers.reader import Format, SampleSource

FILE = "data.mdb"
OPEN: weakref.WeakValueDictionary[tuple[int, int], _Shared] = weakref.WeakValueDictionary()  # by device and inode


def open_lmdb(source: SampleSource) -> DatabaseReader:
    try:
        import lmdb
    except ImportError:
        raise UserError(f"{source.path}: reading LMDB needs the package lmdb: pip install 'dmltrain[lmdb]'") from None
    try:
        shared = _shared(lmdb, source.path)
        _check_size(shared.environment, source.path / FILE)
        keys = _keys(shared.environment)
    except (lmdb.Error, OSError, Damaged) as error:
        raise UserError(f"{source.path}: {error}; copy or make it again") from None

    def find(start: bytes) -> tuple[bytes, bytes] | None:
        try:
            with shared.environment.begin() as transaction, transaction.cursor() as cursor:
                pair: tuple[bytes, bytes] | None = cursor.item() if cursor.set_range(start) else None
                return pair
        except lmdb.Error as error:
            raise Damaged(f"cannot be read: {error}; copy or make it again") from None

    return database.checked(DatabaseReader(source.path, keys, find))


class _Shared:
    """A process can open a database only once, so its readers share it; the last one closes it."""

    def __init__(self, lmdb: Any, path: Path) -> None:
        # Without lock: nobody writes, and many processes may read a folder that they cannot write. Without readahead:
        # py-lmdb's documentation recommends that for random reads of a database that is larger than memory.
        self.environment = lmdb.open(str(path), readonly=True, lock=False, readahead=False)


def _shared(lmdb: Any, path: Path) -> _Shared:
    status = (path / FILE).stat()
    key = (status.st_dev, status.st_ino)
    shared = OPEN.get(key) or _Shared(lmdb, path)
    OPEN[key] = shared
    return shared


def _check_size(environment: Any, file: Path) -> None:
    """LMDB maps the file into memory, so that a page after its end would kill the process."""
    expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if (actual := file.stat().st_size) < expected:
        raise Damaged(f"{FILE} has {actual} bytes, expected {expected}: it is truncated")


def _keys(environment: Any) -> DatabaseKeys:
    with environment.begin() as transaction, transaction.cursor() as cursor:
        if not cursor.first():
            raise Damaged("has no records")
        count, width = environment.stat()["entries"], database.width(cursor.key())
        cursor.last()
        if width and cursor.key().startswith(b"%0*d" % (width, count - 1)):
            return NumberedKeys(count, width)
        cursor.first()
        return ListedKeys(compact_names.collect(cursor.iternext(values=False)))


FORMAT = Format("Caffe's LMDB", lambda path: (path / FILE).is_file(), open_lmdb)
