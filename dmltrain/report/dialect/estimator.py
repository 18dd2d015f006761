"""Logs of MXNet's gluon.contrib.estimator (1.5 and later).

    [Epoch 0] Finished in 0.006s, validation accuracy: 0.0938
    [Epoch 1] Finished in 0.042s, training accuracy: 0.0938, training softmaxcrossentropyloss: 2.3125

Validation is printed before the epoch's line and always with epoch 0, because a separate estimator validates
(LoggingHandler in event_handler.py): it belongs to the epoch of the next line.
"""

from __future__ import annotations

import re
from array import array
from typing import ClassVar

from dmltrain import record
from dmltrain.report.block import Block
from dmltrain.report.run import Found, Values

_MARK = b"] Finished in "
_EPOCH = re.compile(rb"\[Epoch (\d{1,9})\] Finished in (\d{1,9}\.\d{3})s(?:, ([^\r\n]{0,2000}))?")


class Estimator:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("gluon's estimator",)
    sign: ClassVar[bytes] = rb"\] Finished in "

    def __init__(self) -> None:
        self._epochs: dict[int, Values] = {}
        self._validation: list[record.Pair] = []

    def feed(self, block: Block) -> bool:
        if not block.holds(_MARK):
            return False
        for found in _EPOCH.finditer(block.data):
            if found.start() >= block.limit:
                break
            metrics = (found[3] or b"").replace(b"training ", b"training-").replace(b"validation ", b"validation-")
            pairs = [pair for pair in record.listed(metrics, b", ") if block.whole or not pair.at_end]
            if metrics.startswith(b"validation-"):
                self._validation = pairs
            else:
                self._take(int(found[1]), float(found[2]), pairs)
        return bool(self._epochs)

    def found(self) -> list[Found]:
        return [Found(self._epochs)] if self._epochs else []

    def _take(self, epoch: int, seconds: float, training: list[record.Pair]) -> None:
        values = self._epochs.setdefault(epoch, {})
        for key, number in (("seconds", seconds), *((pair.key, pair.value) for pair in training + self._validation)):
            values.setdefault(key, array("d")).append(number)
        self._validation = []
