"""What all sections have in common: their input, their output, and curves over epochs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from urllib.parse import quote

from dmltrain.report.page.chart import Chart, Curve, LineChart
from dmltrain.report.page.html import Content
from dmltrain.report.page.source import PageRun, Sources
from dmltrain.report.summaries.measured import MeasuredRun
from dmltrain.report.summaries.series import positions
from dmltrain.report.table import mean, whole_of_accuracies


@dataclass(frozen=True)
class Section:
    """A heading with text, tables and charts. blocks: HTML or charts, in their order."""

    heading: str
    blocks: Sequence[Content | Chart]

    @property
    def charts(self) -> list[Chart]:
        return [block for block in self.blocks if not isinstance(block, str)]


@dataclass(frozen=True)
class Context:
    """What a section is made from. folder: of the page, for links to logs."""

    sources: Sources
    folder: str = "."
    _bands: dict[tuple[int, str], Band] = field(default_factory=dict)

    @property
    def runs(self) -> Sequence[PageRun]:
        return self.sources.runs

    def link(self, path: str) -> str:
        """A relative address of a file, from the page's folder."""
        relative = os.path.relpath(path, self.folder)
        return quote(PurePath(relative).as_posix().encode("utf-8", "surrogateescape"))

    def band(self, run: PageRun, key: str) -> Band:
        """Mean, smallest and largest value of a run's workers for a key, by epoch; computed once."""
        place = (run.number, key)
        if place not in self._bands:
            self._bands[place] = _band(run, key)
        return self._bands[place]

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all runs, each once, in the order of the logs."""
        return list({key: None for shown in self.runs for values in shown.run.epochs.values() for key in values})

    def lines(self, id: str, title: str, y_label: str, keys: Mapping[str, str], **more: object) -> LineChart:
        """A chart of `keys` (key -> name of its curve) by epoch: the mean of the workers, and their band."""
        curves = [
            self.curve(run, key, name, dash) for run in self.runs for dash, (key, name) in enumerate(keys.items())
        ]
        drawn = [curve for curve in curves if curve.x]
        counts = all(run.run.first is not None for run in self.runs)
        return LineChart(id, title, "epoch" if counts else "epoch or iteration", y_label, drawn, whole=True, **more)  # type: ignore[arg-type]

    def curve(self, run: PageRun, key: str, name: str, dash: int = 0) -> Curve:
        band = self.band(run, key)
        return Curve(run.number, name, band.epochs, band.middle, band.low, band.high, dash)

    def over_time(self, chart: LineChart, id: str) -> LineChart:
        """The same curves over the time since the start; without runs whose log has neither times nor seconds."""
        curves = []
        for curve in chart.curves:
            times = self.times(self.runs[curve.run])
            x = [times.get(int(epoch)) for epoch in curve.x if epoch is not None]
            if any(time is not None for time in x):
                curves.append(Curve(curve.run, curve.name, x, curve.y, curve.low, curve.high, curve.dash))
        label = "seconds since the start"
        more = {"unit": chart.unit, "x_unit": "seconds", "from_zero": chart.from_zero, "again": True}
        return LineChart(id, chart.title, label, chart.y_label, curves, **more)  # type: ignore[arg-type]

    def times(self, run: PageRun) -> dict[int, float]:
        """Epoch as shown -> seconds from the start to its end, the same as in tables and plots over time."""
        at = positions(MeasuredRun(run.run, run.facts), "time")
        return {run.counted(epoch): seconds for epoch, seconds in at.items()}


@dataclass(frozen=True)
class Band:
    """Values by epoch (counted from 1), of those epochs that have any; low and high are () for a single worker."""

    epochs: list[int]
    middle: list[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def _band(run: PageRun, key: str) -> Band:
    rows = [(run.counted(epoch), values[key]) for epoch, values in run.run.epochs.items() if key in values]
    whole = whole_of_accuracies(run.run) if "accuracy" in key else 1.0
    middle = [mean(numbers) / whole for _, numbers in rows]
    epochs = [epoch for epoch, _ in rows]
    if all(len(numbers) == 1 for _, numbers in rows):
        return Band(epochs, middle)
    return Band(
        epochs,
        middle,
        [_extreme(numbers, min) / whole for _, numbers in rows],
        [_extreme(numbers, max) / whole for _, numbers in rows],
    )


def _extreme(numbers: Sequence[float], choose: Callable[[Sequence[float]], float]) -> float:
    finite = [number for number in numbers if math.isfinite(number)]
    return choose(finite) if finite else math.nan
