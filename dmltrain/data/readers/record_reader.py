"""MXNet's RecordIO files with their .idx, or without: it is then rebuilt and kept beside the .rec."""

from __future__ import annotations

from pathlib import Path

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.data.readers import record_index, recordio
from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data.readers.reader import Format, Record, SampleSource
from dmltrain.data.readers.record_index import RecordIndex


class RecordReader:
    """One .rec file. A record's image is the encoded file that it has."""

    class_names = None

    def __init__(self, path: Path, file: DataFile, index: RecordIndex) -> None:
        self._path, self._file, self._index = path, file, index

    def __len__(self) -> int:
        return len(self._index.offsets)

    def read(self, index: int) -> Record:
        try:
            return recordio.read(self._file, int(self._index.offsets[index]))
        except Damaged as error:
            raise UserError(f"{self.where(index)}: {error}") from None

    def where(self, index: int) -> str:
        offset = int(self._index.offsets[index])
        return f"{self._path}: record {index} (key {self._index.key(index)}, offset {offset})"

    def number(self, index: int) -> int:
        return self._index.key(index)

    def digest(self) -> str:
        return self._index.digest(self._file)


def open_records(source: SampleSource) -> RecordReader:
    path = source.path
    try:
        file = DataFile(source.path)
        path = source.index or source.path.with_suffix(".idx")
        if path.exists():
            index = record_index.load(DataFile(path))
            if missed := record_index.check(index, file):
                source.warn(f"{path}: {missed}")
            return RecordReader(source.path, file, index)
        path = source.path
        index = record_index.scan(file)
    except Damaged as error:
        raise UserError(f"{path}: {error}") from None
    _keep(index, source.index or source.path.with_suffix(".idx"), source)
    return RecordReader(source.path, file, index)


def _keep(index: RecordIndex, path: Path, source: SampleSource) -> None:
    try:
        whole_file.write(path, record_index.text(index))
    except OSError as error:
        source.warn(
            f"{path}: cannot be written: {error.strerror or error}; the index of {source.path.name} was rebuilt and is "
            "in memory only, so the next start takes as long"
        )


FORMAT = Format("RecordIO: .rec, with .idx or without", lambda path: path.suffix == ".rec", open_records)
