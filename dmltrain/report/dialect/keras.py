"""Keras' progress bars, of all versions.

    Epoch 1/5
    131072/131072 [==============================] - 26s - loss: 0.7221 - acc: 0.4988      2017; later `26s 200us/step`
    1563/1563 ━━━━━━━━━━ 5s 3ms/step - accuracy: 0.4500 - loss: 1.5 - val_accuracy: 0.51   Keras 3; verbose=2: no bar

An epoch counts when its bar is complete. A file often has several runs in sequence; they are separate runs here.
"""

from __future__ import annotations

import re
from array import array
from typing import ClassVar

from dmltrain import record
from dmltrain.report.block import Block
from dmltrain.report.run import Found, Values

_HEADER = re.compile(rb"Epoch (\d{1,9})/\d")
_METRIC = rb"(?: +- +[A-Za-z][\w.]{0,60}: +" + record.NUMBER + record.END + rb")"
_EVENT = re.compile(
    rb"Epoch (\d{1,9})/\d{1,9}\b"
    rb"|(?<![\d:.])(?<!ETA: )(\d{1,9})s(?:(?: +-)? +[\d.]{1,12}[mun]?s/(?:step|epoch|sample|batch)){0,2}"
    rb"(" + _METRIC + rb"{1,40})"
)
_COUNT = re.compile(rb"(\d{1,12})/(\d{1,12})(?!\d)")
_BACK = re.compile(rb"\x08+")  # bars overwrite themselves also with these
_BAR = 400  # bytes before the seconds that are searched for the bar's count


class Keras:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Keras",)

    def __init__(self) -> None:
        self._runs: list[dict[int, Values]] = []
        self._epoch = 0

    def feed(self, block: Block) -> bool:
        if not self._runs and not (block.holds(b"Epoch ") and _HEADER.search(block.data)):
            return False
        if block.limit < len(block.data):  # one very long line
            self._read(block.data, block.limit, True)
            return any(self._runs)
        data = _BACK.sub(b"\r", block.data) if block.holds(b"\b") else block.data
        lines = data.splitlines(keepends=True)
        for place, line in enumerate(lines, 1):
            if (b": " in line or b"Epoch " in line) and not _incomplete(line):
                self._read(line, len(line), block.whole or place < len(lines))
        return any(self._runs)

    def _read(self, text: bytes, limit: int, whole: bool) -> None:
        """Take the epochs and complete bars that begin before `limit`."""
        for event in _EVENT.finditer(text):
            if event.start() >= limit:
                break
            if event[1]:
                self._begin(int(event[1]))
            elif self._runs and (whole or event.end() < len(text)) and _full(event):
                self._end(event)

    def found(self) -> list[Found]:
        return [Found(run, first=1) for run in self._runs if run]

    def _begin(self, epoch: int) -> None:
        if not self._runs or epoch <= self._epoch:
            self._runs.append({})
        self._epoch = epoch

    def _end(self, event: re.Match[bytes]) -> None:
        values = {pair.key: array("d", (pair.value,)) for pair in record.pairs(event[3], "train")}
        values["seconds"] = array("d", (float(event[2]),))
        self._runs[-1][self._epoch] = values  # a later complete bar of the epoch has more values


def _incomplete(line: bytes) -> bool:
    """Whether a line surely is a bar that is not complete, and nothing else: nearly all lines of a log are."""
    if b"Epoch " in line:
        return False
    eta = line.find(b"ETA: ")
    if eta >= 0 and line.count(b"s ", eta) < 2:
        return True
    counts = _COUNT.findall(line)
    return bool(counts) and all(done != total for done, total in counts)


def _full(event: re.Match[bytes]) -> bool:
    """Whether the bar before the seconds, if any, is complete."""
    start = max(0, event.start() - _BAR)
    line = re.split(rb"[\r\n\x08]", event.string[start : event.start()])[-1]
    counts = _COUNT.findall(line)
    return not counts or counts[-1][0] == counts[-1][1]
