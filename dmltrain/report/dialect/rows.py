"""Rows of CSV files, which the dialects of CSV logs share: a header, then a row for each epoch or step.

    epoch,accuracy,loss,val_accuracy
    0,0.4676,1.4524,0.5589

Cells are separated by commas, semicolons or tabs, and may be quoted. Only the first line of a file can be the header.
A row that has more or fewer cells than the header is left out.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import lt

from dmltrain import record
from dmltrain.report.block import LONGEST_LINE, Block
from dmltrain.report.run import Values

Cells = Sequence[bytes]  # of a row or of a column

_MOST_COLUMNS = 1000
_MARK = b"\xef\xbb\xbf"  # a byte order mark in UTF-8
_MOST_EPOCHS = 10**9  # a larger number is a time
_EPOCH = re.compile(rb"\s*\+?(\d{1,18})(?:\.0*)?\s*")
_SPLITS = "train|training|val|valid|validation|eval|test|testing"
_SPLIT_LAST = re.compile(rf"(.+)_({_SPLITS})")
_METRIC = re.compile(
    rf"(?:{_SPLITS})_.+|(?:.*_)?(?:loss|acc|accuracy|auc|error|f1|mae|mape|mse|perplexity|precision|recall|rmse|top\d+)"
)


class Rows:
    """The rows of a file whose header `accept` takes. header: its names; () before it was read, or if it is none."""

    def __init__(self, accept: Callable[[list[str]], bool]) -> None:
        self.header: tuple[str, ...] = ()
        self.cut = ""  # the name of the column whose last cell may be truncated
        self._accept = accept
        self._started = False
        self._separator = ","

    def read(self, block: Block) -> list[Cells]:
        """The columns of the next block, in the order of the header, all of one length; [] without a row."""
        data = block.data
        if not self._started and data.strip(b"\r\n"):
            self._started, data = True, self._begin(data)
        if not self.header or block.limit < len(data):  # no line of a CSV is longer than a block
            return []
        if not block.whole or b'"' in data:
            return self._by_row(data, block.whole)
        return self._at_once(data) or self._by_row(data, True)

    def _at_once(self, data: bytes) -> list[Cells]:
        """The columns of whole lines without quotes, by one split of all; [] unless each line has every cell."""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        data = data.strip(b"\n")
        count, ends, separator = len(self.header), data.count(b"\n"), self._separator.encode()
        if data.count(separator) != (ends + 1) * (count - 1):
            return []
        cells = data.replace(b"\n", separator + b"\n" + separator).split(separator)
        if cells[count :: count + 1].count(b"\n") != ends:  # a line has more cells, another one fewer
            return []
        return [cells[place :: count + 1] for place in range(count)]

    def _by_row(self, data: bytes, whole: bool) -> list[Cells]:
        """The columns of any lines, without those of more or fewer cells. whole: the last line has its end."""
        lines = data.splitlines()
        last = [] if whole or not lines else [self._whole_cells(self._cells(lines.pop()))]
        rows = [row for row in (*map(self._cells, lines), *last) if len(row) == len(self.header)]
        return list(zip(*rows, strict=True))

    def _begin(self, data: bytes) -> bytes:
        """Read the header; return what follows it."""
        data = data.removeprefix(_MARK).lstrip(b"\r\n")
        line = data[:LONGEST_LINE].splitlines()[:1]
        for self._separator in (",", ";", "\t"):
            names = [name.decode("utf-8", "replace").strip() for name in self._cells(line[0])] if line else []
            if 1 < len(names) <= _MOST_COLUMNS and self._accept(names):
                self.header = tuple(names)
                return data[len(line[0]) :]
        return b""

    def _cells(self, line: bytes) -> Cells:
        if b'"' not in line:
            return line.split(self._separator.encode())
        text = line.decode("utf-8", "replace").replace("\0", "?")
        try:
            return [cell.encode() for cell in next(csv.reader([text], delimiter=self._separator), [])]
        except csv.Error:  # a cell of more than 131072 letters
            return []

    def _whole_cells(self, row: Cells) -> Cells:
        """The cells of a line without an end, of which the last may be truncated."""
        if not any(row) or len(row) > len(self.header):
            return []
        if row[-1]:
            self.cut = self.header[len(row) - 1]
        return [*row[:-1], *[b""] * (len(self.header) - len(row) + 1)]


class Epochs:
    """The numbers of a CSV with a column `epoch`: of each epoch and column the last one.

    name: the report's key of a column, or "" to leave it out. again: whether a file can have several runs, each of
    which begins with the first epoch.
    """

    def __init__(
        self, accept: Callable[[list[str]], bool], name: Callable[[str, list[str]], str], again: bool = False
    ) -> None:
        self.runs: list[dict[int, Values]] = []
        self.repeated: list[int] = []  # epochs that came back
        self.rows = Rows(accept)
        self._name = name
        self._again = again
        self._columns: list[tuple[int, str]] = []  # place, key
        self._epoch_column = 0
        self._last = -1
        self._waiting: Cells = ()  # the last cells of rows without an epoch, which belong to the next one

    def feed(self, block: Block) -> bool:
        columns = self.rows.read(block)
        if not self.rows.header:
            return False
        if not self._columns:
            self._begin(list(self.rows.header))
        if columns:
            if self._waiting:
                columns = [(cell, *column) for cell, column in zip(self._waiting, columns, strict=True)]
            if block.holds(b"_") or not self._take_ascending(columns):
                self._take_any(columns)
        return True

    def values(self) -> list[dict[int, Values]]:
        """The runs with numbers, after the last block."""
        found = [{epoch: values for epoch, values in run.items() if values} for run in self.runs]
        if self._waiting and self.runs and self._last in found[-1]:
            found[-1][self._last] = {
                **found[-1][self._last],
                **self._numbers([(cell,) for cell in self._waiting], 0, 1),
            }
        return [run for run in found if run]

    def notes(self) -> tuple[str, ...]:
        """Remarks for readers of the table."""
        notes = []
        if self.repeated:
            notes.append(f"epoch {self.repeated[0]} appears again later, as after a restart: its last row is shown")
        if self.rows.cut:
            notes.append(f"the last line is truncated; its {self.rows.cut} is ignored")
        return tuple(notes)

    def _begin(self, header: list[str]) -> None:
        self._epoch_column = next(place for place, name in enumerate(header) if plain(name) == "epoch")
        named: dict[str, int] = {}
        for place, name in enumerate(header):
            key = self._name(name, header) if place != self._epoch_column else ""
            if key:
                named.setdefault(key, place)  # the first column of a name
        self._columns = [(place, key) for key, place in named.items()]

    def _take_ascending(self, columns: list[Cells]) -> bool:
        """Take rows that are one epoch each and have only numbers, which is many times faster."""
        texts = columns[self._epoch_column]
        if texts[0] in texts[1:2]:
            return False
        try:
            epochs = list(map(int, texts))
            ascending = all(map(lt, epochs, epochs[1:]))
            if not ascending or epochs[0] <= self._last or epochs[-1] >= _MOST_EPOCHS:
                return False
            numbers = [(key, array("d", map(float, columns[place]))) for place, key in self._columns]
        except ValueError:
            return False
        if not self.runs:
            self.runs.append({})
        run = self.runs[-1]
        keys = [key for key, _ in numbers]
        slices = [[column[place : place + 1] for place in range(len(column))] for _, column in numbers]
        run.update(zip(epochs, (dict(zip(keys, row, strict=True)) for row in zip(*slices, strict=True)), strict=True))
        self._last = epochs[-1]
        return True

    def _take_any(self, columns: list[Cells]) -> None:
        epochs = list(columns[self._epoch_column])
        whole = rows = len(epochs)
        if b"" in epochs:
            whole = _fill(epochs)
        start = 0
        for text, group in groupby(epochs[:whole]):
            end = start + len(list(group))
            epoch = as_epoch(text)
            if epoch is not None:
                self._keep(epoch, columns, start, end)
            start = end
        self._waiting = tuple(_last(column[whole:]) for column in columns) if whole < rows else ()

    def _keep(self, epoch: int, columns: Sequence[Cells], start: int, end: int) -> None:
        if epoch < self._last and self.runs and epoch in self.runs[-1]:
            if self._again and epoch == next(iter(self.runs[-1])):
                self.runs.append({})
            else:
                self.repeated.append(epoch)
        if not self.runs:
            self.runs.append({})
        self._last = epoch
        self.runs[-1].setdefault(epoch, {}).update(self._numbers(columns, start, end))

    def _numbers(self, columns: Sequence[Cells], start: int, end: int) -> Values:
        """The last number of each column in some rows."""
        values: Values = {}
        for place, key in self._columns:
            cell = columns[place][end - 1] or _last(columns[place][start:end])
            if cell and (number := as_number(cell)) is not None:
                values[key] = array("d", (number,))
        return values


def _fill(epochs: list[bytes]) -> int:
    """Give rows without an epoch the next one's; returns how many rows have one then."""
    whole = len(epochs)
    while whole and not epochs[whole - 1]:
        whole -= 1
    following = b""
    for place in range(whole - 1, -1, -1):
        if epochs[place]:
            following = epochs[place]
        else:
            epochs[place] = following
    return whole


def _last(cells: Cells) -> bytes:
    """The last cell that is not empty."""
    return next(filter(None, reversed(cells)), b"")


def as_number(cell: bytes) -> float | None:
    """The number in a cell; None if it is something else, such as a list."""
    try:
        return float(cell) if b"_" not in cell else None
    except ValueError:
        return None


def as_epoch(cell: bytes) -> int | None:
    """The whole number in a cell, below 10^9."""
    found = _EPOCH.fullmatch(cell)
    return int(found[1]) if found and int(found[1]) < _MOST_EPOCHS else None


def key(name: str, section: str = "train") -> str:
    """The report's key of a column: `val/acc` and `acc_val` -> validation_accuracy, `loss` -> train_loss.

    `section` is the split of names without one.
    """
    name = plain(name)
    if name == "learning_rate" or re.fullmatch(r"lr(_.*)?", name):
        return "learning_rate"
    swapped = _SPLIT_LAST.fullmatch(name)
    return record.key(f"{swapped[2]}_{swapped[1]}" if swapped else name, section)


def is_metric(name: str) -> bool:
    """Whether a column is called like something that training measures."""
    name = re.sub(r"_(step|epoch)$", "", plain(name))  # Lightning's
    return bool(_METRIC.fullmatch(name) or _SPLIT_LAST.fullmatch(name))


def plain(name: str) -> str:
    """A name in small letters, digits and _."""
    return re.sub(r"[\W_]+", "_", name.lower()).strip("_")
