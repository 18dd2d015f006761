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
from dmltrain.report.stamp import Clock

MARK = b"solver.cpp:"
SAID = rb"solver\.cpp:\d{1,6}\] {0,20}(?:\[[^\]\r\n]{0,20}\] {0,20})?"  # before each line; NVIDIA's Caffe names a GPU
_NAMED = rb" net output #\d{1,4}: (" + record.NAME + rb") = (" + record.VALUE + rb")" + record.END
_ITERATION = SAID + rb"Iteration (\d{1,9})(?: \([^)\r\n]{0,80}\))?, "
# Each pattern begins with a literal, for which re searches many times faster than for an alternative.
_TESTING = re.compile(_ITERATION + rb"Testing net \(#(\d{1,4})\)")
_TEST = re.compile(SAID + rb"Test" + _NAMED)
_LOSS = re.compile(_ITERATION + rb"loss = (" + record.VALUE + rb")" + record.END)
_TRAIN = re.compile(SAID + rb"Train" + _NAMED)


class Caffe:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Caffe",)

    def __init__(self) -> None:
        self._tests: dict[int, Values] = {}
        self._snapshots: dict[int, dict[str, float]] = {}
        self._train: dict[str, float] = {}  # displayed last
        self._testing: Values = {}
        self._clock, self._elapsed = Clock(), dict[int, float]()

    def feed(self, block: Block) -> bool:
        self._clock.feed(block)
        if not block.holds(MARK):
            return False
        start = 0
        for test in _TESTING.finditer(block.data):
            if test.start() >= block.limit:
                break
            self._read(block, start, test.end())
            self._begin(int(test[1]), int(test[2]))
            self._time(block, test)
            start = test.end()
        self._read(block, start, len(block.data))
        return any(self._tests.values())

    def found(self) -> list[Found]:
        tests = {iteration: values for iteration, values in self._tests.items() if values}
        snapshots = {iteration: self._snapshots[iteration] for iteration in tests}
        elapsed = {iteration: seconds for iteration, seconds in self._elapsed.items() if iteration in tests}
        return [Found(tests, snapshots, None, elapsed=elapsed)] if tests else []

    def _time(self, block: Block, test: re.Match[bytes]) -> None:
        """Until the test began, which needs no training time itself."""
        if (seconds := self._clock.seconds(block.data, test.start())) is not None and int(test[2]) == 0:
            self._elapsed[int(test[1])] = seconds

    def _begin(self, iteration: int, net: int) -> None:
        """A test begins."""
        self._testing = {}
        if net == 0:
            self._tests[iteration] = self._testing
            self._snapshots[iteration] = dict(self._train)

    def _read(self, block: Block, start: int, end: int) -> None:
        """The values that are printed between two places. Of each name the last one counts."""
        for name, value in _lines(_TEST, block, start, end):
            self._testing[record.key(name.decode("utf-8", "replace"), "validation")] = array(
                "d", (record.number(value),)
            )
        losses = _lines(_LOSS, block, start, end)
        if losses:
            self._train["train_loss"] = record.number(
                losses[-1][1]
            )  # a mean over iterations, unlike the net's own output
        for name, value in dict(_lines(_TRAIN, block, start, end)).items():
            if name != b"loss":
                self._train[record.key(name.decode("utf-8", "replace"), "train")] = record.number(value)


def _lines(pattern: re.Pattern[bytes], block: Block, start: int, end: int) -> list[tuple[bytes, bytes]]:
    """Name and value of each line that `pattern` finds."""
    if end < len(block.data) or (block.whole and block.limit == end):
        return pattern.findall(block.data, start, end)
    return [
        (line[1], line[2])
        for line in pattern.finditer(block.data, start)
        # a number at the very end may be truncated
        if line.start() < block.limit and (block.whole or line.end() < len(block.data))
    ]
