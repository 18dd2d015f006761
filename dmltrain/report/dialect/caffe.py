"""Caffe's logs. Their iterations take the place of epochs: a row is a test of the network.

    I0605 03:34:06.1 27501 solver.cpp:237] Iteration 4960, loss = 5.01
    I0605 03:34:06.1 27501 solver.cpp:253]     Train net output #0: accuracy = 0.1
    I0605 03:34:07.4 27501 solver.cpp:341] Iteration 5000, Testing net (#0)
    I0605 03:36:14.6 27501 solver.cpp:409]     Test net output #0: accuracy = 0.079

The training values of a row are the last ones displayed before the test. Only the first test net (#0) is read. Without
a test a row is a displayed iteration. Caffe of early 2014 writes `Testing net` and `Test score #0: 0.1` without names.
Another start is where `Solving NET` stands, or iterations begin again; see `attempts`.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from dmltrain.logs import record
from dmltrain.report.dialect import attempts
from dmltrain.report.runs.block import TRUNCATED, Block
from dmltrain.report.runs.run import FileValues, Values
from dmltrain.report.runs.stamp import Clock

MARK = b"solver.cpp:"
SAID = rb"solver\.cpp:\d{1,6}\] {0,20}(?:\[[^\]\r\n]{0,20}\] {0,20})?"  # before each line; NVIDIA's Caffe names a GPU
NAME = rb"[^\r\n=]{1,200}"  # any text up to the value; greedy, which is faster, because ` = ` follows
_EVENT = re.compile(  # begins with a literal, for which re searches many times faster than for an alternative
    SAID
    + rb"(?:(?P<solving>Solving[ (])|Iteration (?P<iteration>\d{1,9})(?: \([^)\r\n]{0,80}\))?, "
    + rb"(?:(?P<test>Testing net)(?: \(#(?P<net>\d{1,4})\))?|loss = (?P<loss>"
    + record.VALUE
    + rb")"
    + record.END
    + rb")|(?:(?P<split>Test|Train) net output #\d{1,4}: (?P<name>"
    + NAME
    + rb") = |Test score #(?P<score>[01]): )(?P<value>"
    + record.VALUE
    + rb")"
    + record.END
    + rb")"
)
_SCORES = ("validation_accuracy", "validation_loss")  # of the nets that Caffe of 2014 came with
_UNNAMED = "`Test score #0` has no name: read as accuracy, and #1 as loss, as in Caffe's examples of 2014"


class Caffe:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Caffe",)
    sign: ClassVar[bytes] = rb"solver\.cpp:\d{1,6}\]"

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._at = -1  # iteration
        self._solving = False  # whether the next iteration is of another start
        self._cut: dict[str, None] = {}  # names of values that may be truncated
        self._clock = Clock()

    def feed(self, block: Block) -> bool:
        self._clock.feed(block)
        if not block.holds(MARK):
            return False
        for event in _EVENT.finditer(block.data):
            if event.start() >= block.limit:
                break
            if block.whole or event.end() < len(block.data):  # a number at the very end may be truncated
                self._take(block, event)
            elif event["value"] or event["loss"]:
                self._cut[(event["name"] or b"score" if event["value"] else b"loss").decode("utf-8", "replace")] = None
        return any(part.tests or part.shown for part in self._parts)

    def runs(self) -> list[FileValues]:
        tested = any(values for part in self._parts for values in part.tests.values())
        notes = tuple(map(TRUNCATED.format, self._cut))
        runs_of_log = attempts.runs([part.start(tested).settled(self._clock) for part in self._parts], named=True)
        return [*runs_of_log[:-1], *(replace(run, notes=(*run.notes, *notes)) for run in runs_of_log[-1:])]

    def _take(self, block: Block, event: re.Match[bytes]) -> None:
        self._solving |= bool(event["solving"])
        if event["iteration"]:
            iteration = int(event["iteration"])
            if not self._parts or self._solving or iteration < self._at:
                self._solving = False
                self._parts.append(_Part(iteration, self._clock.seconds(block.data, event.start())))
            self._at = iteration
        if not self._parts:
            return
        part = self._parts[-1]
        if event["value"]:
            part.output(event["split"], event["name"], event["score"], record.number(event["value"]))
        elif event["test"]:
            part.begin_test(self._at, int(event["net"] or 0), self._clock.seconds(block.data, event.start()))
        elif event["loss"]:
            seconds = None if part.tested else self._clock.seconds(block.data, event.start())
            part.show(self._at, record.number(event["loss"]), seconds)


class _Part:
    """What a log has from one start to the next."""

    def __init__(self, first: int, began: float | None) -> None:
        self._first, self._began = first, began
        self.tests: dict[int, Values] = {}
        self.shown: dict[
            int, dict[str, float]
        ] = {}  # training values of each displayed iteration, until there is a test
        self._snapshots: dict[int, dict[str, float]] = {}
        self._train: dict[str, float] = {}  # displayed last
        self._testing: Values = {}
        self._elapsed: dict[int, float] = {}
        self._notes: dict[str, None] = {}
        self.tested = False

    def start(self, tested: bool) -> attempts.LogSection:
        """tested: the log has tests, so that other iterations are no rows."""
        if tested:
            epochs = {iteration: values for iteration, values in self.tests.items() if values}
            snapshots = {iteration: self._snapshots[iteration] for iteration in epochs}
        else:
            epochs, snapshots = {step: _arrays(values) for step, values in self.shown.items()}, {}
        elapsed = {iteration: seconds for iteration, seconds in self._elapsed.items() if iteration in epochs}
        values = FileValues(epochs, snapshots, None, tuple(self._notes), elapsed)
        return attempts.LogSection(self._first, values, self._began, spoken=False)

    def begin_test(self, iteration: int, net: int, seconds: float | None) -> None:
        """Until a test began is a row's time: it needs no training time itself."""
        self._testing = {}
        if net == 0:
            self.tests[iteration] = self._testing
            self._snapshots[iteration] = dict(self._train)
            self._time(iteration, seconds)

    def show(self, iteration: int, loss: float, seconds: float | None) -> None:
        self._train = {"train_loss": loss}  # a mean over iterations, unlike the net's own output
        if not self.tested:
            self.shown[iteration] = self._train
            self._time(iteration, seconds)

    def output(self, split: bytes | None, name: bytes | None, score: bytes | None, value: float) -> None:
        if split != b"Train" and not self.tested:
            self.tested = True
            self.shown.clear()
        if score:
            self._notes[_UNNAMED] = None
            self._testing[_SCORES[int(score)]] = array("d", (value,))
        elif split == b"Test" and name:
            self._testing[record.key(name.decode("utf-8", "replace"), "validation")] = array("d", (value,))
        elif name and name != b"loss":
            self._train[_train_key(name)] = value

    def _time(self, iteration: int, seconds: float | None) -> None:
        if seconds is not None:
            self._elapsed[iteration] = seconds


@lru_cache(4096)
def _train_key(name: bytes) -> str:
    return record.key(name.decode("utf-8", "replace"), "train")


def _arrays(values: dict[str, float]) -> Values:
    return {key: array("d", (number,)) for key, number in values.items()}
