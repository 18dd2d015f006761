"""Logs and net_outputs files of PMLS-Caffe (Poseidon, Bösen's Caffe). Iterations take the place of epochs.

    I0605 03:34:06.1 27501 solver.cpp:341] Iteration 5000, Testing net (#0)
    I0605 03:34:06.2 27501 solver.cpp:409]     Test net output #0: accuracy = 0.5521
    I0605 03:34:06.3 27501 solver.cpp:237] Iteration 5000, loss: 1.64, time: 141.8

Later versions write `Iteration 5000, model version: 17, loss: ...`.
Only thread 0 of worker 0 writes these lines, with its own values. `NAME.netoutputs` has the means of all threads of all
workers, a table for the training net and one for each test net, if the solver has `display` and `test_interval`:

    Iteration,time,loss,loss,
    0,0.93,2.30259,2.30259,

    Iteration,time,loss,accuracy,loss,
    0,0.41,0,0.1,2.30259,

A row is a test of the first test net (#0), or a displayed iteration where there is no test. Its training values are the
last ones at or before its iteration. The times printed are seconds since the start; `seconds` is since the row before.
A second start in a log is told from the first as in Caffe's.
The sources are src/caffe/solver.cpp (Solve, Test, PrintOutputBlobs) of github.com/sailing-pmls/pmls-caffe.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from dataclasses import replace
from typing import ClassVar

from dmltrain.logs import record
from dmltrain.report.dialect import attempts
from dmltrain.report.dialect.caffe import MARK, NAME, SAID
from dmltrain.report.dialect.rows import as_number
from dmltrain.report.runs.block import TRUNCATED, Block
from dmltrain.report.runs.run import FileValues, Values

Numbers = dict[str, float]

_MODEL = rb"(?:model version: -?\d{1,12}, )?"  # of later versions
_LOSS = _MODEL + rb"loss(?::| =) "
_EVENT = re.compile(
    SAID
    + rb"(?:(?P<solving>Solving[ (])|Iteration (?P<iteration>\d{1,9}), (?:"
    + _MODEL
    + rb"Testing net \(#(?P<net>\d{1,4})\)|"
    + _LOSS
    + rb"(?P<loss>"
    + record.VALUE
    + rb"), time: (?P<time>"
    + record.VALUE
    + rb")"
    + record.END
    + rb")|(?:Test loss: |(?P<split>Test|Train) net output #\d{1,4}: (?P<name>"
    + NAME
    + rb") = )(?P<value>"
    + record.VALUE
    + rb")"
    + record.END
    + rb")"
)
_FIRST = re.compile(  # what is displayed first; with a time by PMLS-Caffe
    SAID
    + rb"Iteration \d{1,9}(?:, "
    + _LOSS
    + record.VALUE
    + rb"(, time: )"
    + record.VALUE
    + record.END
    + rb"|(?: \([^)\r\n]{0,80}\))?, loss = "
    + record.VALUE
    + record.END
    + rb")"
)
_HEADER = b"Iteration,time,loss,"
_FIXED = 3  # columns
_MOST_OUTPUTS = 1000


class PMLS:
    """Reads blocks of a log or of a net_outputs file; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("PMLS-Caffe",)
    sign: ClassVar[bytes] = rb"Iteration \d{1,9}, loss: "

    def __init__(self) -> None:
        self._reader: _Log | _Tables | None = None

    def feed(self, block: Block) -> bool:
        if self._reader is None and block.data.strip():
            self._reader = _Tables() if block.data.lstrip().startswith(_HEADER) else _Log()
        return self._reader.feed(block) if self._reader else False

    def runs(self) -> list[FileValues]:
        return self._reader.runs() if self._reader else []


def _rows(tests: dict[int, Numbers], train: dict[int, Numbers]) -> FileValues:
    """The tests, or what was displayed if there are none."""
    rows = tests or dict.fromkeys(train, {})
    iterations = sorted(train)
    before = {row: iterations[: bisect_right(iterations, row)][-1:] for row in rows}
    merged = {row: {**(train[before[row][0]] if before[row] else {}), **rows[row]} for row in sorted(rows)}
    elapsed = {row: values.pop("elapsed") for row, values in merged.items() if "elapsed" in values}
    return FileValues(_with_seconds(merged, elapsed), first=None, elapsed=elapsed)


class _Log:
    def __init__(self) -> None:
        self._known: bool | None = None  # whether the log is PMLS-Caffe's; False: Caffe's
        self._parts: list[_Part] = []
        self._at = -1  # iteration
        self._solving = False  # whether the next iteration is of another start
        self._cut: dict[str, None] = {}  # names of values that may be truncated

    def feed(self, block: Block) -> bool:
        if self._known is False or not block.holds(MARK):
            return False
        first = _FIRST.search(block.data) if self._known is None else None
        if first:
            self._known = bool(first[1])
        for event in _EVENT.finditer(block.data):
            if event.start() >= block.limit:
                break
            if block.whole or event.end() < len(block.data):  # a number at the very end may be truncated
                self._take(event)
            elif event["value"] or event["time"]:
                name = event["name"] or (b"Test loss" if event["value"] else b"time")
                self._cut[name.decode("utf-8", "replace")] = None
        return bool(self._known)

    def runs(self) -> list[FileValues]:
        if not self._known:
            return []
        tested = any(values for part in self._parts for values in part.tests.values())
        runs_of_log = attempts.runs([part.start(tested) for part in self._parts], named=True)
        notes = tuple(map(TRUNCATED.format, self._cut))
        return [*runs_of_log[:-1], *(replace(run, notes=(*run.notes, *notes)) for run in runs_of_log[-1:])]

    def _take(self, event: re.Match[bytes]) -> None:
        self._solving |= bool(event["solving"])
        if event["iteration"]:
            iteration = int(event["iteration"])
            if not self._parts or self._solving or iteration < self._at:
                self._solving = False
                self._parts.append(_Part(iteration))
            self._at = iteration
        if not self._parts:
            return
        part = self._parts[-1]
        if event["loss"]:
            values = {"train_loss": record.number(event["loss"]), "elapsed": record.number(event["time"])}
            part.display(self._at, values)
        elif event["net"]:
            part.begin_test(self._at, int(event["net"]))
        elif event["value"]:
            part.output(event["split"] or b"", event["name"] or b"", record.number(event["value"]))


class _Part:
    """What a log has from one start to the next."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.tests: dict[int, Numbers] = {}
        self._train: dict[int, Numbers] = {}  # of each test; of each displayed iteration while there is no test
        self._test: Numbers = {}
        self._displayed: Numbers = {}

    def start(self, tested: bool) -> attempts.LogSection:
        """tested: the log has tests, so that other iterations are no rows."""
        tests = {iteration: values for iteration, values in self.tests.items() if values}
        values = _rows(tests, self._train) if tests or not tested else FileValues(first=None)
        return attempts.LogSection(self._first, values, 0.0, spoken=False)

    def output(self, split: bytes, name: bytes, value: float) -> None:
        """Without a name it is the test's loss."""
        if not name:
            self._test["validation_loss"] = value
        elif split == b"Test":
            self._test[record.key(name.decode("utf-8", "replace"), "validation")] = value
        elif name != b"loss":
            self._displayed[record.key(name.decode("utf-8", "replace"), "train")] = value

    def display(self, iteration: int, values: Numbers) -> None:
        self._displayed = values
        if not self.tests or iteration in self.tests:
            self._train[iteration] = values

    def begin_test(self, iteration: int, net: int) -> None:
        self._test = {}
        if net == 0:
            if not self.tests:
                self._train.clear()
            self.tests[iteration] = self._test
            self._train[iteration] = self._displayed


class _Tables:
    def __init__(self) -> None:
        self._tables: list[dict[int, list[float | None]]] = []
        self._names: list[list[str]] = []

    def feed(self, block: Block) -> bool:
        if block.limit < len(block.data):
            return True
        lines = block.data.splitlines()
        for place, line in enumerate(lines):
            cells = line.split(b",")
            if line.endswith(b",") or not (block.whole or place + 1 < len(lines)):
                cells.pop()  # nothing, or what may be truncated
            if line.startswith(_HEADER):
                names = [name.decode("utf-8", "replace") for name in cells[_FIXED : _FIXED + _MOST_OUTPUTS]]
                self._names.append(names)
                self._tables.append({})
            elif len(cells) >= _FIXED and self._tables:
                iteration, *numbers = [as_number(cell) for cell in cells[: _FIXED + _MOST_OUTPUTS]]
                if iteration is not None and 0 <= iteration < 1e9:
                    self._tables[-1][int(iteration)] = numbers
        return True

    def runs(self) -> list[FileValues]:
        values = _rows(*self._rows())
        return [values] if values.epochs else []

    def _rows(self) -> tuple[dict[int, Numbers], dict[int, Numbers]]:
        tables = [(names, table) for names, table in zip(self._names, self._tables, strict=True) if table]
        if tables and not any(row[1] for row in tables[0][1].values()):
            return self._numbers(*tables[0], "validation"), {}  # a training net has a loss
        train = self._numbers(*tables[0], "train") if tables else {}
        return (self._numbers(*tables[1], "validation") if len(tables) > 1 else {}), train

    def _numbers(self, names: list[str], table: dict[int, list[float | None]], split: str) -> dict[int, Numbers]:
        """Rows by the report's keys. The column loss is 0 for a test net, unless the solver has test_compute_loss."""
        keys = [record.key(name, split) for name in names]
        rows = {}
        for iteration, (elapsed, loss, *outputs) in table.items():
            named = zip(keys, outputs, strict=True) if len(outputs) == len(keys) else ()
            fixed = [("elapsed", elapsed), (f"{split}_loss", loss if loss or split == "train" else None)]
            row = [*named, *fixed] if split == "train" else [*fixed, *named]
            rows[iteration] = {key: number for key, number in row if number is not None}
        return rows


def _with_seconds(rows: dict[int, Numbers], elapsed: dict[int, float]) -> dict[int, Values]:
    """The rows with `seconds`: since the row before, or since the start of the program where its clock began again. A
    row without a time of its own has none."""
    epochs: dict[int, Values] = {}
    before = 0.0
    for iteration, row in rows.items():
        now = elapsed.get(iteration)
        seconds = {} if now in (None, before) else {"seconds": round(now - before, 6) if now > before else now}
        before = before if now is None else now
        epochs[iteration] = {key: array("d", (number,)) for key, number in {**row, **seconds}.items()}
    return epochs
