"""Rows of CSV files, which the dialects of CSV logs share: a header, then a row for each epoch or step.

    epoch,accuracy,loss,val_accuracy
    0,0.4676,1.4524,0.5589

Cells are separated by commas, semicolons or tabs, and may be quoted. The first line of a file has to be a header; a
later one is that of the rows which follow it. A row that has more or fewer cells than its header is left out, and a
note has its line.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import lt
from typing import NamedTuple

from dmltrain.logs import record
from dmltrain.report.dialect import attempts
from dmltrain.report.runs.block import LONGEST_LINE, TRUNCATED, Block
from dmltrain.report.runs.packed import packer
from dmltrain.report.runs.run import Values

Cells = Sequence[bytes]  # of a row or of a column

_MOST_COLUMNS = 1000
_CLOCK = 1e8  # seconds; a larger time is one of the clock, since 1970
_LEAST_OF_FIRST = 0.2  # if times count from a start, a mean epoch takes at least this fraction of the first
_MOST_NAMED = 5  # lines in a note
_MOST_EPOCHS = 10**9  # a larger number is a time
_EPOCH = re.compile(rb"\s*\+?(\d{1,18})(?:\.0*)?\s*")
_TIME = re.compile(rb"\s*(?:(\d{1,6}):)?(\d{1,6}):(\d{2})\s*")
_SPLITS = "train|training|val|valid|validation|eval|test|testing"
_SPLIT_LAST = re.compile(rf"(.+)_({_SPLITS})")
_BESIDE = re.compile(  # keys of columns that are measured in a test, too
    r"train_(?:.*_)?(?:time|elapsed|duration|seconds|lr|learning_rate|momentum|weight_decay|memory|mem|step|hp_metric)"
    r"(?:_.*)?"
)
_METRIC = re.compile(
    rf"(?:{_SPLITS})_.+|(?:.*_)?(?:loss|acc|accuracy|auc|error|f1|mae|mape|mse|perplexity|precision|recall|rmse|top\d+)"
)


class HeaderRows(NamedTuple):
    """Rows with one header: its names, and the columns in its order, all of one length. begins: the header stands above
    these rows, and not in an earlier part."""

    header: tuple[str, ...]
    columns: list[Cells]
    begins: bool


class Rows:
    """The rows of a file whose header `accept` takes. header: its names; () before it was read, or if it is none.

    mark: letters that every header has, so that most blocks need no search for another one.
    """

    def __init__(self, accept: Callable[[list[str]], bool], mark: bytes) -> None:
        self.header: tuple[str, ...] = ()
        self.cut = ""  # the name of the column whose last cell may be truncated
        self._accept = accept
        self._mark = mark
        self._started = False
        self._separator = ","
        self._line = 0  # lines before the block
        self._unfit: list[int] = []  # lines that fit no header
        self._unfit_count = 0

    def read(self, block: Block) -> list[HeaderRows]:
        """The rows of the next block; [] without any."""
        if not self._started and block.data.strip(b"\r\n"):
            self._started = True
            return self._parts(block, block.data) if self._begins(block) else []
        if not self.header or block.limit < len(block.data):  # no line of a CSV is longer than a block
            return []
        if block.holds(self._mark):
            return self._parts(block, block.data)
        return [HeaderRows(self.header, columns, False)] if (columns := self._columns(block.data, block.whole)) else []

    def notes(self) -> tuple[str, ...]:
        """Remarks for readers of the table."""
        notes = []
        if self._unfit:
            more = f" and {self._unfit_count - len(self._unfit)} more" if self._unfit_count > len(self._unfit) else ""
            lines = ", ".join(map(str, self._unfit))
            notes.append(
                f"rows with more or fewer cells than their header are left out: line{'s' * (self._unfit_count > 1)} "
                f"{lines}{more}"
            )
        if self.cut:
            notes.append(TRUNCATED.format(self.cut))
        return tuple(notes)

    def _begins(self, block: Block) -> bool:
        """Whether the first line is a header; it decides what separates cells."""
        line = block.data.lstrip(b"\r\n")[:LONGEST_LINE].splitlines()[0:1]
        for self._separator in (",", ";", "\t"):
            if line and self._names(line[0]):
                return block.limit == len(block.data)
        return False

    def _parts(self, block: Block, data: bytes) -> list[HeaderRows]:
        """The rows of a block that may have headers."""
        parts, start, begins = [], 0, False
        lines = data.splitlines(keepends=True)
        for place, line in enumerate(lines):
            names = self._names(line.strip(b"\r\n")) if self._mark in line else ()
            if names:
                if columns := self._columns(b"".join(lines[start:place]), True):
                    parts.append(HeaderRows(self.header, columns, begins))
                self.header, start, begins = names, place + 1, True
                self._line += 1
        columns = self._columns(b"".join(lines[start:]), block.whole)
        return [*parts, HeaderRows(self.header, columns, begins)] if columns or begins else parts

    def _names(self, line: bytes) -> tuple[str, ...]:
        """The names of a header; () if the line is none."""
        names = [name.decode("utf-8", "replace").strip() for name in self._cells(line)]
        return tuple(names) if 1 < len(names) <= _MOST_COLUMNS and self._accept(names) else ()

    def _columns(self, data: bytes, whole: bool) -> list[Cells]:
        columns = self._at_once(data) if whole and b'"' not in data else []
        columns = columns or self._by_row(data, whole)
        self._line += data.count(b"\n") or data.count(b"\r")
        return columns

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
        rows = list(map(self._cells, lines))
        for place, row in enumerate(rows):
            if len(row) != len(self.header) and any(row):
                self._unfit_count += 1
                if len(self._unfit) < _MOST_NAMED:
                    self._unfit.append(self._line + place + 1)
        return list(zip(*(row for row in (*rows, *last) if len(row) == len(self.header)), strict=True))

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

    name: the report's key of a column, or "" to leave it out. A file can have several runs, each of which begins with
    the first epoch. Where a later one comes again, the run went on from there: what followed it before is left out. An
    epoch has begun again also where its steps go back, or another header stands before it.
    """

    def __init__(self, accept: Callable[[list[str]], bool], name: Callable[[str, list[str]], str]) -> None:
        self.runs: list[dict[int, Values]] = []
        self.repeated: list[int] = []  # epochs that came back
        self.rows = Rows(accept, b"poch")
        self._name = name
        self._not_numbers: set[tuple[int, int]] = set()  # run and epoch whose training values are no numbers
        self._columns: list[tuple[int, str]] = []  # place, key
        self._epoch_column = 0
        self._last = -1
        self._step_column: int | None = None
        self._step = -1.0  # of the last row
        self._headed = False  # whether another header was the last line
        self._rows_of: dict[int, Counter[int]] = {}  # run -> epoch -> rows with training values
        self._waiting: Cells = ()  # the last cells of rows without an epoch, which belong to the next one

    def feed(self, block: Block) -> bool:
        for part in self.rows.read(block):
            columns = part.columns
            if part.begins:
                self._begin(list(part.header))
            if columns and self._waiting:
                columns = [(cell, *column) for cell, column in zip(self._waiting, columns, strict=True)]
            # int() and float() accept `1_000`, which is no number in a log; as_number does not.
            if columns and (block.holds(b"_") or not self._take_ascending(columns)):
                self._take_any(columns)
        return bool(self.rows.header)

    def values(self) -> list[dict[int, Values]]:
        """The runs that have numbers, after the last block. Tests and validations after the training are left out."""
        runs = [{epoch: values for epoch, values in run.items() if values} for run in self.runs]
        waiting = self._numbers([(cell,) for cell in self._waiting], 0, 1) if self._waiting else {}
        if self.runs and self._last in runs[-1] and waiting.keys() - {"step", "learning_rate"}:
            runs[-1][self._last] = runs[-1][self._last] | waiting
        if (
            self.rows.cut and self.runs and self._last in runs[-1]
            # A truncated cell replaces the value of an earlier row, and is no value itself.
        ):
            runs[-1][self._last].pop(self._name(self.rows.cut, list(self.rows.header)), None)
        not_numbers = [{epoch for part, epoch in self._not_numbers if part == number} for number in range(len(runs))]
        return [_without_tests(run, names) for run, names in zip(runs, not_numbers, strict=True) if run]

    def notes(self) -> tuple[str, ...]:
        """Remarks for readers of the table."""
        again = (
            f"epoch {self.repeated[0]} appears again later, as after a restart: its last rows are shown, and what "
            "followed it before is left out"
            if self.repeated
            else ""
        )
        once = self._begun_again()
        return (
            *filter(None, [again]),
            *([attempts.restart_note("epoch", once)] if once is not None else []),
            *self.rows.notes(),
        )

    def _begun_again(self) -> int | None:
        """An epoch with several rows in a run whose other epochs have one each."""
        for number, counts in self._rows_of.items():
            several, epochs = [epoch for epoch, count in counts.items() if count > 1], len(self.runs[number])
            if several and (epochs == 1 or 2 * len(several) <= epochs):
                return min(several)
        return None

    def _begin(self, header: list[str]) -> None:
        self._epoch_column = next(place for place, name in enumerate(header) if plain(name) == "epoch")
        named: dict[str, int] = {}
        for place, name in enumerate(header):
            key = self._name(name, header) if place != self._epoch_column else ""
            if key:
                named.setdefault(key, place)  # the first column of a name
        self._columns = [(place, key) for key, place in named.items()]
        self._step_column = named.get("step")
        self._headed = bool(self.runs)
        self._waiting = ()

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
        run.update(zip(epochs, map(packer(keys), *(column for _, column in numbers)), strict=True))
        self._last = epochs[-1]
        self._headed = False
        if self._step_column is not None:
            self._step = numbers[[key for key, _ in numbers].index("step")][1][-1]
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
                for first, last in self._ascending(columns, start, end):
                    self._keep(epoch, columns, first, last)
            start = end
        self._waiting = tuple(_last(column[whole:]) for column in columns) if whole < rows else ()

    def _ascending(self, columns: Sequence[Cells], start: int, end: int) -> list[tuple[int, int]]:
        """Rows of one epoch in parts, in each of which no step goes back."""
        if self._step_column is None:
            return [(start, end)]
        steps = list(map(as_number, columns[self._step_column][start:end]))
        pairs = zip(steps, steps[1:], strict=False)
        cuts = [place for place, (a, b) in enumerate(pairs, start + 1) if a is not None and b is not None and b < a]
        return list(zip([start, *cuts], [*cuts, end], strict=True))

    def _keep(self, epoch: int, columns: Sequence[Cells], start: int, end: int) -> None:
        numbers = self._numbers(columns, start, end)
        step = as_number(columns[self._step_column][start]) if self._step_column is not None else None
        back = self._headed or (step is not None and step < self._step)
        if self.runs and epoch in self.runs[-1] and (epoch < self._last or (epoch == self._last and back)):
            if not self._headed and not any(map(trains, numbers)) and any(map(trains, self.runs[-1][epoch])):
                return  # a test or validation of another program, which counts its own epochs
            self._start_again(epoch)
        if not self.runs:
            self.runs.append({})
        self._last, self._headed, is_known = epoch, False, epoch in self.runs[-1]
        self._step = numbers["step"][0] if "step" in numbers else self._step
        self.runs[-1].setdefault(epoch, {}).update(numbers)
        trained = [place for place, key in self._columns if trains(key)]
        if not any(map(trains, numbers)) and any(any(columns[place][start:end]) for place in trained):
            self._not_numbers.add((len(self.runs) - 1, epoch))
        if self._step_column is None:
            rows = sum(any(columns[place][row] for place in trained) for row in range(start, end))
            counts = self._rows_of.setdefault(len(self.runs) - 1, Counter())
            counts[epoch] += rows + (is_known and epoch not in counts)

    def _start_again(self, epoch: int) -> None:
        """Begin a new run if this epoch is the last run's first one; else go back to this epoch in the last run."""
        if epoch == next(iter(self.runs[-1])):
            self.runs.append({})
        else:
            self.repeated.append(epoch)
            counts = self._rows_of.get(len(self.runs) - 1, Counter())
            self._rows_of[len(self.runs) - 1] = Counter({number: n for number, n in counts.items() if number < epoch})
            self.runs[-1] = {number: values for number, values in self.runs[-1].items() if number < epoch}

    def _numbers(self, columns: Sequence[Cells], start: int, end: int) -> Values:
        """The last number of each column in some rows."""
        values: Values = {}
        for place, key in self._columns:
            cell = columns[place][end - 1] or _last(columns[place][start:end])
            number = as_seconds(cell) if key == "seconds" else as_number(cell)
            if number is not None:
                values[key] = array("d", (number,))
        return values


def trains(key: str) -> bool:
    """Whether a key is of a metric that training has, and tests have not."""
    return key.startswith("train_") and not _BESIDE.fullmatch(key)


def _without_tests(run: dict[int, Values], not_numbers: set[int]) -> dict[int, Values]:
    """The epochs of a run whose program went on to test or validate: rows after the last epoch that trained are no
    epochs. The last epoch gets their values of tests. not_numbers: epochs whose training values are no numbers."""
    trained = not_numbers | {epoch for epoch, values in run.items() if any(map(trains, values))}
    epochs, tests = sorted(run), dict[str, "array[float]"]()
    while len(epochs) > 1 and epochs[-1] not in trained and _is_beside(run, epochs, bool(trained)):
        tests = {key: numbers for key, numbers in run[epochs.pop()].items() if key.startswith("test_")} | tests
    kept = {epoch: run[epoch] for epoch in run if epoch <= epochs[-1]} if len(epochs) < len(run) else run
    kept[epochs[-1]] = {**kept[epochs[-1]], **tests}
    return kept


def _is_beside(run: dict[int, Values], epochs: Sequence[int], trained: bool) -> bool:
    """Whether the last of these epochs, which has no training values, is a test. trained: others have some."""
    steps = [run[epoch]["step"][0] for epoch in epochs if "step" in run[epoch]]
    if len(steps) == len(epochs):
        typical = (steps[-2] - steps[0]) / (len(steps) - 2) if len(steps) > 2 else steps[0]
        return steps[-1] - steps[-2] <= typical / 2 if typical > 0 else trained
    return trained or all(map(_of_test, run[epochs[-1]]))


def own_seconds(run: dict[int, Values]) -> dict[int, float]:
    """If the seconds of a run count from its start, or are times of the clock, replace them by those of each epoch.
    Returns epoch -> seconds since the start; {} if they are those of epochs already. Where seconds go back, the program
    was started again."""
    epochs = sorted(run)
    if epochs and "seconds" not in run[epochs[-1]]:  # perhaps truncated
        epochs.pop()
    times = [run[epoch]["seconds"][0] for epoch in epochs if "seconds" in run[epoch]]
    cuts = [place for place, (a, b) in enumerate(zip(times, times[1:], strict=False), 1) if not a < b]
    parts = [times[first:end] for first, end in zip([0, *cuts], [*cuts, len(times)], strict=True)]
    clock = bool(times) and times[0] > _CLOCK
    if len(times) < len(epochs) or not times or (cuts and clock) or not (clock or _are_cumulative(parts)):
        return {}
    elapsed, passed = list[float](), 0.0
    for part in parts:
        start = part[0] if clock else 0.0
        elapsed += [round(passed + time - start, 6) for time in part]
        passed = elapsed[-1]
    for epoch, end, before in zip(epochs, elapsed, (0.0, *elapsed), strict=False):
        run[epoch] = {**run[epoch], "seconds": array("d", (round(end - before, 6),))}
    if clock:
        del run[epochs[0]]["seconds"]
    return dict(zip(epochs, elapsed, strict=True))


def _are_cumulative(parts: Sequence[Sequence[float]]) -> bool:
    """Whether times count from a start: in each part they ascend by steps that are not much smaller than its first."""
    longer = [part for part in parts if len(part) > 1]
    return bool(longer) and all((part[-1] - part[0]) / (len(part) - 1) >= part[0] * _LEAST_OF_FIRST for part in longer)


def _of_test(key: str) -> bool:
    return key.startswith("test_") or not key.startswith(("train_", "validation_")) or bool(_BESIDE.fullmatch(key))


def _fill(epochs: list[bytes]) -> int:
    """Give rows without an epoch that of the next row which has one; returns how many rows have an epoch then."""
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


def as_seconds(cell: bytes) -> float | None:
    """The number in a cell, which may be minutes and seconds, or hours, too."""
    clock = _TIME.fullmatch(cell)
    return int(clock[1] or 0) * 3600.0 + int(clock[2]) * 60 + int(clock[3]) if clock else as_number(cell)


def as_epoch(cell: bytes) -> int | None:
    """The whole number in a cell, below 10^9."""
    match = _EPOCH.fullmatch(cell)
    return int(match[1]) if match and int(match[1]) < _MOST_EPOCHS else None


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
