"""Charts as values, and as JSON for the page's scripts. Nothing here draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dmltrain.report.page import thin
from dmltrain.report.page.pack import Pool
from dmltrain.report.page.thin import Numbers


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    run: number of the run, whose colour and marker it has. name: what it is of the run (train, validation, a host),
    "" if the run has one. dash: 0 solid, 1 dashed, 2 dotted, ... low, high: the band, () if none.
    """

    run: int
    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    dash: int = 0


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis. unit, x_unit: how values are shown (assets/value.js). whole: the axis counts
    epochs. again: another chart has the same values over another axis."""

    id: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    unit: str = ""
    x_unit: str = ""
    whole: bool = False
    from_zero: bool = False
    again: bool = False

    @property
    def drawn(self) -> bool:
        """Whether there is anything to draw."""
        return any(thin.finite(number) for curve in self.curves for number in curve.y)

    def numbers(self, most: int) -> int:
        """About how many numbers it brings into the page, if curves have at most `most` points."""
        return sum(min(most, len(curve.y)) * (1 if self.again else 3 if curve.low else 1) for curve in self.curves)

    def json(self, pool: Pool, most: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": "lines",
            "title": self.title,
            "xLabel": self.x_label,
            "yLabel": self.y_label,
            "unit": self.unit,
            "xUnit": self.x_unit,
            "whole": self.whole,
            "fromZero": self.from_zero,
            "curves": [_curve(curve, pool, most) for curve in self.curves],
        }

    @property
    def longest(self) -> int:
        return max((len(curve.y) for curve in self.curves), default=0)

    def notes(self) -> list[str]:
        """What a reader must know of the drawing."""
        gaps = sum(number is not None and not thin.finite(number) for curve in self.curves for number in curve.y)
        return [f"{gaps} value{'s' * (gaps != 1)} that are not finite (NaN or infinite) are gaps."] if gaps else []


def _curve(curve: Curve, pool: Pool, most: int) -> dict[str, Any]:
    places = thin.indices_to_keep(curve.y, most)
    packed = {
        "run": curve.run,
        "name": curve.name,
        "dash": curve.dash,
        "x": pool.place(curve.x[place] for place in places),
        "y": pool.place(curve.y[place] for place in places),
    }
    if curve.low and (list(curve.low) != list(curve.y) or list(curve.high) != list(curve.y)):
        packed["low"] = pool.place(thin.extremes(curve.low, places, largest=False))
        packed["high"] = pool.place(thin.extremes(curve.high, places, largest=True))
    return packed


@dataclass(frozen=True)
class Stack:
    """Stacked bars of one run. groups: what a reader chooses from (all workers, worker 0, ...), each with one list of
    numbers for every part, one number for each of `labels`. mean: how many epochs one bar is the mean of."""

    id: str
    title: str
    x_label: str
    y_label: str
    run: int
    labels: Sequence[str]
    parts: Sequence[str]
    groups: dict[str, Sequence[Numbers]] = field(default_factory=dict)
    unit: str = ""
    mean: int = 1

    @property
    def drawn(self) -> bool:
        return any(thin.finite(number) for group in self.groups.values() for part in group for number in part)

    def numbers(self, most: int) -> int:
        return sum(len(part) for group in self.groups.values() for part in group)

    def json(self, pool: Pool, most: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": "stack",
            "title": self.title,
            "xLabel": self.x_label,
            "yLabel": self.y_label,
            "unit": self.unit,
            "run": self.run,
            "labels": list(self.labels),
            "parts": list(self.parts),
            "groups": [
                {"name": name, "values": [pool.place(part) for part in parts]} for name, parts in self.groups.items()
            ],
        }

    @property
    def longest(self) -> int:
        return 0  # its bars do not become fewer

    def notes(self) -> list[str]:
        return [f"Each bar is the mean of {self.mean} epochs."] if self.mean > 1 else []


Chart = LineChart | Stack
