"""Writes a .rec and its .idx, byte for byte as MXNet's MXIndexedRecordIO does.

The records go to a file with the suffix .part, which is renamed when it is complete. A killed writer leaves it, and the
next one can continue after its last complete record.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.data.readers import record_index, recordio
from dmltrain.data.readers.data_file import Damaged, DataFile
from dmltrain.data.readers.record_index import RecordIndex


class RecordWriter:
    """The file `path` (.rec) and its .idx; `finish` gives them their names.

    resume: go on where a killed writer stopped; `keys` are those of the records that are in the file. UserError: it
    cannot be written.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._offsets, self.keys, self._end = array("q"), array("Q"), 0
        if resume:
            self._take_over()
        with self._errors_with_file():
            self._file = self._part.open("r+b" if self._end else "wb")
            self._file.truncate(self._end)
            self._file.seek(self._end)

    @contextlib.contextmanager
    def _errors_with_file(self) -> Iterator[None]:
        """Errors with the file and the fix."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._part}: cannot be written: {error.strerror or error}; free some space or choose another disk, "
                "then start again"
            ) from None

    def _take_over(self) -> None:
        """Find the whole records of the file that a killed writer left, and the end of the last."""
        with contextlib.suppress(Damaged):  # no such file, or the end of the last whole record
            file = DataFile(self._part)
            for offset, key in record_index.records(file):
                self._offsets.append(offset)
                self.keys.append(key)
                self._end = recordio.extent(file, offset).end

    def write(self, labels: float | Sequence[float], key: int, image: bytes) -> None:
        """Add a record: its label or labels, a number for it, and an encoded image. ValueError: too large."""
        pieces = list(recordio.encode(recordio.pack(labels, key, image)))
        with self._errors_with_file():
            self._file.writelines(pieces)
        self._offsets.append(self._end)
        self.keys.append(key)
        self._end += sum(map(len, pieces))

    def finish(self) -> None:
        """Give the .rec its name, and write the .idx."""
        idx = self._path.with_suffix(".idx")
        offsets, keys = np.frombuffer(self._offsets, np.int64), np.frombuffer(self.keys, np.uint64)
        with self._errors_with_file():
            self._file.flush()
            idx.unlink(missing_ok=True)  # an old one would be that of another file
            whole_file.put(self._part, self._file.fileno(), self._path)
            self._file.close()
            whole_file.write(idx, record_index.text(RecordIndex(offsets, keys)))

    def close(self) -> None:
        """End without a name for the file, unless it is finished; the next writer can go on with it."""
        with contextlib.suppress(OSError):  # of a full disk, which `write` has told
            self._file.close()
