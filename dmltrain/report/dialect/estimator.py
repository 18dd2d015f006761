"""Logs of MXNet's gluon.contrib.estimator (1.5 and later).

    [Epoch 0] Finished in 0.006s, validation accuracy: 0.0938
    [Epoch 1] Finished in 0.042s, training accuracy: 0.0938, training softmaxcrossentropyloss: 2.3125

Validation is printed before the epoch's line and always with epoch 0, because a separate estimator validates
(LoggingHandler in event_handler.py): it belongs to the epoch of the next line. A second start, after `Training begin:`
or where epochs go back, is a run of its own.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import replace
from typing import ClassVar, NamedTuple

from dmltrain.logs import record
from dmltrain.report.dialect import attempts
from dmltrain.report.runs.block import TRUNCATED, Block
from dmltrain.report.runs.run import FileValues, Values

_MARK, _BEGIN = b"] Finished in ", b"Training begin: "
_EVENT = re.compile(rb"Training begin: |\[Epoch (\d{1,9})\] Finished in (\d{1,9}\.\d{3})s(?:, ([^\r\n]{0,2000}))?")


class Estimator:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("gluon's estimator",)
    sign: ClassVar[bytes] = rb"\] Finished in "

    def __init__(self) -> None:
        self._starts: list[tuple[int, list[_Row]]] = []
        self._begins = False  # whether the next epoch is of another start
        self._said = True  # whether each start said so
        self._validation: list[record.Pair] = []
        self._cut: dict[str, None] = {}  # names of values that may be truncated

    def feed(self, block: Block) -> bool:
        if not (block.holds(_MARK) or block.holds(_BEGIN)):
            return False
        for match in _EVENT.finditer(block.data):
            if match.start() >= block.limit:
                break
            if not match[1]:
                self._begins = True
                continue
            metrics = (match[3] or b"").replace(b"training ", b"training-").replace(b"validation ", b"validation-")
            pairs = record.pairs_of_list(metrics, b", ")
            if pairs and pairs[-1].at_end and not block.whole:
                self._cut[pairs.pop().name.decode("utf-8", "replace")] = None
            if metrics.startswith(b"validation-"):
                self._validation = pairs
            else:
                self._take(int(match[1]), float(match[2]), pairs)
        return bool(self._starts)

    def runs(self) -> list[FileValues]:
        starts = [attempts.LogSection(first, _values_of_start(rows), spoken=False) for first, rows in self._starts]
        runs_of_log = attempts.runs(starts, named=self._said) if starts else []
        notes = tuple(map(TRUNCATED.format, self._cut))
        return [*runs_of_log[:-1], *(replace(run, notes=(*run.notes, *notes)) for run in runs_of_log[-1:])]

    def _take(self, epoch: int, seconds: float, training: list[record.Pair]) -> None:
        if not self._starts or self._begins or epoch < self._starts[-1][1][-1].epoch:
            self._said &= self._begins
            self._starts.append((epoch, []))
        self._begins = False
        self._starts[-1][1].append(_Row(epoch, seconds, [*training, *self._validation]))
        self._validation = []


class _Row(NamedTuple):
    epoch: int
    seconds: float
    pairs: list[record.Pair]


def _values_of_start(rows: list[_Row]) -> FileValues:
    """The values of a start. Where an epoch has more rows than others, it was begun again."""
    counts = Counter(row.epoch for row in rows)
    frequent = Counter(counts.values()).most_common()
    workers = min(count for count, times in frequent if times == frequent[0][1]) if len(counts) > 1 else 1
    epochs: dict[int, Values] = {}
    left = Counter(counts)
    for epoch, seconds, pairs in rows:
        left[epoch] -= 1
        values = epochs.setdefault(epoch, {})
        for key, number in (("seconds", seconds), *((pair.key, pair.value) for pair in pairs)):
            if left[epoch] < workers:
                values.setdefault(key, array("d")).append(number)
    several = [epoch for epoch, count in counts.items() if count > workers]
    return FileValues(epochs, notes=(attempts.restart_note("epoch", several[0]),) if several else ())
