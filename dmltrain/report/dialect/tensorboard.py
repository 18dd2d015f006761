"""CSV files that TensorBoard exports: one metric of one run.

    Wall time,Step,Value
    1700000000.123,0,0.4676

Only the file's name says which metric: run-validation-tag-epoch_accuracy.csv. Steps of a tag `epoch_...` (Keras) are
epochs from 0; other steps are iterations. Steps that begin again are a run of their own. Together in a folder, the
files of a run are one table.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from operator import lt
from pathlib import PurePath
from typing import ClassVar, NamedTuple

from dmltrain.logs import record
from dmltrain.report.dialect import attempts
from dmltrain.report.dialect.rows import Cells, Rows, as_epoch, as_number, key, plain
from dmltrain.report.runs.block import Block
from dmltrain.report.runs.packed import packer
from dmltrain.report.runs.run import FileValues, Values

_MOST_STEPS = 10**9
_LONG = 20  # times the usual time between steps
_LEAST_PAUSE = 60.0  # seconds
_PAUSE = (
    "step {}: {:.0f} s after the one before, many times as long as others, as after a restart: its time is left out"
)
_NAME = re.compile(r"run-(?P<run>.*?)-tag-(?P<tag>.+)")


class TensorBoard:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("TensorBoard (CSV)",)
    sign: ClassVar[bytes] = rb"Wall time,Step,Value"

    def __init__(self) -> None:
        self._rows = Rows(lambda header: [plain(name) for name in header] == ["wall_time", "step", "value"], b"tep")
        self._attempts: list[_Attempt] = []
        self._again: dict[int, int] = {}  # attempt -> a step that it has twice
        self._file = ""

    def feed(self, block: Block) -> bool:
        self._file = block.name
        for part in self._rows.read(block):
            try:
                self._take(part.columns, plain=not block.holds(b"_"))
            except ValueError:
                for row in zip(*part.columns, strict=True):
                    self._take_row(row)
        return bool(self._rows.header)

    def runs(self) -> list[FileValues]:
        metric, by_epoch = _metric(PurePath(self._file).name)
        nameless = "the file's name does not say what its values are: expected run-RUN-tag-NAME.csv"
        notes = (*self._rows.notes(), *((nameless,) if metric == "value" else ()))
        again = [
            [attempts.restart_note("step", self._again[number])] if number in self._again else []
            for number in range(len(self._attempts))
        ]
        return [
            attempt.file_values(metric, by_epoch, (*notes, *more))
            for attempt, more in zip(self._attempts, again, strict=True)
        ]

    def _take(self, columns: list[Cells], plain: bool) -> None:
        """Take columns of numbers, several times faster than row by row. ValueError if some are none."""
        times, steps, numbers = columns
        places = list(map(int, steps))
        if not plain or not all(map(lt, places, places[1:])) or places[0] < 0 or places[-1] >= _MOST_STEPS:
            raise ValueError("a step is out of range or order")
        values, seconds = list(map(float, numbers)), list(map(float, times))
        attempt = self._attempt(places[0])
        attempt.numbers.update(zip(places, values, strict=True))
        attempt.times.update(zip(places, seconds, strict=True))

    def _take_row(self, cells: Cells) -> None:
        time, step, number = as_number(cells[0]), as_epoch(cells[1]), as_number(cells[2])
        if step is not None and number is not None:
            attempt = self._attempt(step)
            attempt.numbers[step] = number
            attempt.times[step] = math.nan if time is None else time

    def _attempt(self, step: int) -> _Attempt:
        """That of a row: steps that begin again are a second start."""
        last = next(reversed(self._attempts[-1].numbers), -1) if self._attempts else -1
        if not self._attempts or step < last or (step == last and len(self._attempts[-1].numbers) == 1):
            self._attempts.append(_Attempt({}, {}))
        elif step == last:
            self._again.setdefault(len(self._attempts) - 1, step)
        return self._attempts[-1]


class _Attempt(NamedTuple):
    """Numbers and times (s) of one start, by step."""

    numbers: dict[int, float]
    times: dict[int, float]

    def file_values(self, metric: str, by_epoch: bool, notes: tuple[str, ...]) -> FileValues:
        steps = sorted(self.numbers)
        numbers = array("d", map(self.numbers.__getitem__, steps))
        times = array("d", map(self.times.__getitem__, steps))
        seconds = array("d", [round(time - before, 6) for before, time in zip(times, times[1:], strict=False)])
        pauses = _pauses(seconds)
        if pauses:
            notes = (*notes, _PAUSE.format(steps[pauses[0] + 1], seconds[pauses[0]]))
            for place in pauses:
                seconds[place] = math.nan
        alone, timed = packer([metric]), packer([metric, "seconds"])
        epochs: dict[int, Values] = {
            step: alone(numbers[place])
            if place == 0 or not seconds[place - 1] >= 0 or (by_epoch and step != steps[place - 1] + 1)
            else timed(numbers[place], seconds[place - 1])
            for place, step in enumerate(steps)
        }
        elapsed = {
            step: round(time - times[0], 6) for step, time in zip(steps, times, strict=True) if time - times[0] >= 0
        }
        return FileValues(epochs, first=0 if by_epoch else None, notes=notes, elapsed=elapsed)


def _pauses(seconds: Sequence[float]) -> list[int]:
    """Places of times between steps that are so long that the program was not running all the time."""
    usual = sorted(number for number in seconds if number > 0)
    return [
        place
        for place, number in enumerate(seconds)
        if len(usual) > 1 and number > max(_LEAST_PAUSE, _LONG * usual[(len(usual) - 1) // 2])
    ]


def _metric(file: str) -> tuple[str, bool]:
    """The key of the metric in a file of this name, and whether its steps are epochs."""
    match = _NAME.fullmatch(file.removesuffix(".csv"))
    if not match:
        return "value", False
    tag, run = plain(match["tag"]), plain(match["run"])
    by_epoch = tag.startswith("epoch_")
    split = next((split for word in run.split("_") if (split := record.split(word))), "")
    return key(tag.removeprefix("epoch_"), split), by_epoch
