"""Caffe's logs. Their iterations take the place of epochs: a row is a test of the network.

    I0605 03:34:06.1 27501 solver.cpp:237] Iteration 4960, loss = 5.01
    I0605 03:34:06.1 27501 solver.cpp:253]     Train net output #0: accuracy = 0.1
    I0605 03:34:07.4 27501 solver.cpp:341] Iteration 5000, Testing net (#0)
    I0605 03:36:14.6 27501 solver.cpp:409]     Test net output #0: accuracy = 0.079

The training values of a row are the last ones displayed before the test. Only the first test net (#0) is read.
"""

from __future__ import annotations

import re
from array import array
from typing import ClassVar

from dmltrain import record
from dmltrain.report.block import Block
from dmltrain.report.run import Found, Values

_MARK = b"solver.cpp"
_EVENT = re.compile(
    rb"Iteration (\d{1,9})(?: \([^)\r\n]{0,80}\))?, "
    rb"(?:Testing net \(#(\d{1,4})\)|loss = (" + record.NUMBER + rb")" + record.END + rb")"
    rb"|(Test|Train) net output #\d{1,4}: ([A-Za-z][\w@./+-]{0,80}) = (" + record.NUMBER + rb")" + record.END
)


class Caffe:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Caffe",)

    def __init__(self) -> None:
        self._tests: dict[int, Values] = {}
        self._snapshots: dict[int, dict[str, float]] = {}
        self._train: dict[str, float] = {}  # displayed last
        self._testing: Values = {}

    def feed(self, block: Block) -> bool:
        if not block.holds(_MARK):
            return False
        for event in _EVENT.finditer(block.data):
            if event.start() >= block.limit:
                break
            if block.whole or event.end() < len(block.data):  # a number at the very end may be truncated
                self._take(*event.groups())
        return True

    def found(self) -> list[Found]:
        tests = {iteration: values for iteration, values in self._tests.items() if values}
        return [Found(tests, {iteration: self._snapshots[iteration] for iteration in tests}, None)] if tests else []

    def _take(self, iteration: bytes, net: bytes, loss: bytes, split: bytes, name: bytes, value: bytes) -> None:
        if loss:
            self._train["train_loss"] = float(loss)  # a mean over iterations, unlike the net's own output
        elif iteration:
            self._testing = {}
            if int(net) == 0:
                self._tests[int(iteration)] = self._testing
                self._snapshots[int(iteration)] = dict(self._train)
        elif split == b"Test":
            self._testing[record.key(name.decode("ascii"), "validation")] = array("d", (float(value),))
        elif name != b"loss":
            self._train[record.key(name.decode("ascii"), "train")] = float(value)
