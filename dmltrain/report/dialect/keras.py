"""Keras' progress bars, of all versions.

    Epoch 1/5
    131072/131072 [==============================] - 26s - loss: 0.7221 - acc: 0.4988      2017; later `26s 200us/step`
    1563/1563 ━━━━━━━━━━ 5s 3ms/step - accuracy: 0.4500 - loss: 1.5 - val_accuracy: 0.51   Keras 3; verbose=2: no bar

Keras of 2015 writes `Epoch 0` without a total and counts from 0. An epoch counts when its bar is complete. Bars of
`evaluate` and `predict` have another number of steps, or follow the epoch's own bar: they are no epoch's. A file often
has several runs in sequence; they are separate runs here.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from typing import ClassVar

from dmltrain.logs import record
from dmltrain.report.runs.block import TRUNCATED, Block
from dmltrain.report.runs.run import FileValues, Values

_EPOCH = rb"Epoch (\d{1,9})(?:/\d{1,9}\b|(?=[ \t]{0,80}[\r\n]))"
_HEADER = re.compile(_EPOCH)
_EVENT = re.compile(
    _EPOCH
    + rb"|(?<![\d:.])(?<!ETA: )(\d{1,9})s(?:(?: +-)? +[\d.]{1,12}[mun]?s/(?:step|epoch|sample|batch)){0,2}(?= +- )"
)
_COUNT = re.compile(rb"(\d{1,12})/(\d{1,12}(?!\d)|Unknown\b)")  # unknown: until the first epoch ends
_BAR_COUNT = re.compile(rb"(\d{1,12})/(\d{1,12})(?= (?:\[[=>.]|\xe2\x94|- +\d))")
_BACK = re.compile(rb"\x08+")  # bars overwrite themselves also with these
_BAR = 400  # bytes before the seconds that are searched for the bar's count
_LONGEST = 8000  # bytes of the metrics


class Keras:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Keras",)
    sign: ClassVar[bytes] = rb"Epoch \d{1,9}/\d{1,9}|\d/\d{1,12} \[[=>.]"

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._epoch = 0
        self._steps = b""  # of the epoch, as its bar counts them
        self._redrawn = False  # whether the line of the epoch's complete bar has not ended
        self._cut: dict[str, None] = {}  # names of values that may be truncated

    def feed(self, block: Block) -> bool:
        if not self._runs and not (block.holds(b"Epoch ") and _HEADER.search(block.data)):
            return False
        if block.limit < len(block.data):  # one very long line
            self._read(block.data, block.limit, True)
            return self._has_epochs()
        data = _BACK.sub(b"\r", block.data) if block.holds(b"\b") else block.data
        lines = data.splitlines(keepends=True)
        for place, line in enumerate(lines, 1):
            if b": " in line or b"Epoch " in line:
                if not _incomplete(line):
                    self._read(line, len(line), block.whole or place < len(lines))
                elif not self._steps and (count := _BAR_COUNT.search(line)):
                    self._steps = count[2]
            if line.endswith(b"\n"):
                self._redrawn = False
        return self._has_epochs()

    def runs(self) -> list[FileValues]:
        runs_of_log = [FileValues(run.epochs, first=run.first) for run in self._runs if run.epochs]
        notes = tuple(map(TRUNCATED.format, self._cut))
        return [*runs_of_log[:-1], *(replace(run, notes=notes) for run in runs_of_log[-1:])]

    def _has_epochs(self) -> bool:
        return any(run.epochs for run in self._runs)

    def _read(self, text: bytes, limit: int, whole: bool) -> None:
        """Take the epochs and complete bars that begin before `limit`."""
        events = list(_EVENT.finditer(text))
        ends = [event.start() for event in events[1:]] + [len(text)]
        for event, end in zip(events, ends, strict=False):
            if event.start() >= limit:
                break
            if event[1]:
                self._begin(int(event[1]), 1 if b"/" in event[0] else 0)
            elif self._runs:
                metrics = re.split(rb"[\r\n]", text[event.end() : min(end, event.end() + _LONGEST)], maxsplit=1)[0]
                pairs = record.pairs_of_list(metrics, b" - ", "train")
                if pairs and pairs[-1].at_end and not whole and event.end() + len(metrics) == len(text):
                    self._cut[pairs.pop().name.decode("utf-8", "replace")] = None
                self._take(event, pairs)

    def _begin(self, epoch: int, first: int) -> None:
        if not self._runs or epoch <= self._epoch:
            self._runs.append(_Run(first))
        self._epoch, self._steps, self._redrawn = epoch, b"", False

    def _take(self, event: re.Match[bytes], pairs: list[record.Pair]) -> None:
        """Take a bar if it is complete and the epoch's own."""
        done, total = _count(event)
        if total == b"Unknown":
            return
        self._steps = self._steps or total
        if not pairs or done != total or (total and total != self._steps):
            return
        values = {pair.key: array("d", (pair.value,)) for pair in pairs}
        values["seconds"] = array("d", (float(event[2]),))
        before = self._runs[-1].epochs.get(self._epoch, {})
        if not before or self._redrawn or (_validated(values) and not _validated(before)):
            self._runs[-1].epochs[self._epoch] = values
            self._redrawn = True


class _Run:
    def __init__(self, first: int) -> None:
        self.first = first
        self.epochs: dict[int, Values] = {}


def _validated(values: Values) -> bool:
    return any(key.startswith("validation_") for key in values)


def _incomplete(line: bytes) -> bool:
    """Whether a line surely is a bar that is not complete, and nothing else: nearly all lines of a log are."""
    if b"Epoch " in line:
        return False
    eta = line.find(b"ETA: ")
    if eta >= 0 and line.count(b"s ", eta) < 2:
        return True
    counts = _COUNT.findall(line)
    return bool(counts) and all(done != total for done, total in counts)


def _count(event: re.Match[bytes]) -> tuple[bytes, bytes]:
    """Steps done and all steps of the bar before the seconds; empty if there is no bar."""
    start = max(0, event.start() - _BAR)
    line = re.split(rb"[\r\n\x08]", event.string[start : event.start()])[-1]
    done, total = (_COUNT.findall(line) or [(b"", b"")])[-1]
    return done, total
