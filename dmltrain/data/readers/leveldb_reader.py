"""Caffe's LEVELDB: a folder with CURRENT and tables, whose values are Datums.

LevelDB lets only one process open a database, writes to it whenever it opens it, and has neither a read-only mode nor
the number of records. So each process opens a folder of its own, with links to the tables and copies of the few other
files. The keys are read once, which reads the whole database, and are stored beside it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.base.errors import UserError
from dmltrain.data.readers import compact_names, database, stored_index
from dmltrain.data.readers.compact_names import CompactNames
from dmltrain.data.readers.data_file import Damaged
from dmltrain.data.readers.database import DatabaseKeys, DatabaseReader, ListedKeys, NumberedKeys
from dmltrain.data.readers.reader import Format, SampleSource
from dmltrain.data.readers.stored_index import StoredIndex

TABLES = (".ldb", ".sst")
OTHERS = ("CURRENT", "MANIFEST-*", "*.log")  # that a database needs


def open_leveldb(source: SampleSource) -> DatabaseReader:
    try:
        import plyvel
    except ImportError:
        raise UserError(
            f"{source.path}: reading LevelDB needs the package plyvel, for Python before 3.13: "
            "pip install 'dmltrain[leveldb]'"
        ) from None
    try:
        view = _View(plyvel, source.path)
        keys = _keys(view, source)
    except (plyvel.Error, OSError, Damaged) as error:
        raise UserError(f"{source.path}: {error}; copy or make it again") from None
    return database.checked(DatabaseReader(source.path, keys, view.find))


class _View:
    """The database, opened in a folder of its own."""

    def __init__(self, plyvel: Any, path: Path) -> None:
        self._error = plyvel.Error
        folder = tempfile.mkdtemp(prefix="dmltrain-leveldb-")
        remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for file in filter(Path.is_file, path.iterdir()):
            if file.suffix in TABLES:
                (Path(folder) / file.name).symlink_to(file.absolute())
            elif any(map(file.match, OTHERS)):
                shutil.copyfile(file, Path(folder) / file.name)
        try:
            self.database = plyvel.DB(folder, create_if_missing=False)
        except BaseException:
            remove()
            raise

    def find(self, start: bytes) -> tuple[bytes, bytes] | None:
        try:
            with self.database.iterator(start=start, verify_checksums=True) as iterator:
                pair: tuple[bytes, bytes] | None = next(iterator, None)
                return pair
        except self._error as error:
            raise Damaged(f"cannot be read: {error}; copy or make it again") from None

    def keys(self) -> Iterator[bytes]:
        with self.database.iterator(include_value=False) as iterator:
            yield from iterator


def _keys(view: _View, source: SampleSource) -> DatabaseKeys:
    """Those that are kept, if they are of these tables; else they are read and kept."""
    tables = sorted([file.name, file.stat().st_size] for file in source.path.iterdir() if file.suffix in TABLES)
    path = source.index or stored_index.path(source.path)
    if path.exists():
        try:
            return _loaded(stored_index.load(path), tables)
        except Damaged as error:
            source.warn(f"{path}: {error}; it is made again")
    keys = _numbered(view.keys()) or ListedKeys(compact_names.collect(view.keys()))
    if not len(keys):
        raise Damaged("has no records")
    try:
        stored_index.save(path, _saved(keys, tables))
    except OSError as error:
        source.warn(f"{path}: cannot be written: {error.strerror or error}; the next start reads all keys again")
    return keys


def _numbered(keys: Iterator[bytes]) -> NumberedKeys | None:
    """If every key begins with its number."""
    width, count = database.width(next(keys, b"")), 1
    for key in keys if width else ():
        if not key.startswith(b"%0*d" % (width, count)):
            return None
        count += 1
    return NumberedKeys(count, width) if width else None


def _saved(keys: DatabaseKeys, tables: list[Any]) -> StoredIndex:
    if isinstance(keys, ListedKeys):
        content = np.frombuffer(keys.names.content, np.uint8)
        return StoredIndex({"tables": tables}, {"content": content, "ends": keys.names.ends})
    return StoredIndex({"tables": tables, "numbered": [len(keys), len(keys.start(0))]}, {})


def _loaded(index: StoredIndex, tables: list[Any]) -> DatabaseKeys:
    """Raises Damaged if it is not the index of this database."""
    if index.facts.get("tables") != tables:
        raise Damaged("it is the index of another database")
    match index.facts.get("numbered"), index.arrays:
        case [int(count), int(width)], _ if count > 0 and 5 <= width <= 18:
            return NumberedKeys(count, width)
        case None, {"content": content, "ends": ends} if content.dtype == np.uint8 and ends.dtype == np.uint32:
            if len(ends) and int(ends[-1]) == len(content) and (ends[1:] >= ends[:-1]).all():
                return ListedKeys(CompactNames(content.tobytes(), ends))
    raise Damaged("it has no keys")


FORMAT = Format("Caffe's LEVELDB", lambda path: (path / "CURRENT").is_file(), open_leveldb)
