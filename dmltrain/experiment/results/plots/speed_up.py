"""Rates over the number of workers or devices, and the speed-up against each curve's first point, with the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmltrain.experiment.results.plots import choice, lines
from dmltrain.experiment.results.plots.choice import Chosen, PlotData
from dmltrain.experiment.results.plots.lines import Point
from dmltrain.report import style

TITLE = "Rate and speed-up"
CHOICES = {"x": choice.name, "y": choice.name}  # processors and samples_per_second if not chosen


def draw(shown: PlotData, chosen: Chosen) -> Any:
    """Two panels: y over x, and y divided by that of the smallest x; or one pair for each value of `panels`."""
    x, y = chosen.get("x", "processors"), chosen.get("y", "samples_per_second")
    rows = shown.rows(chosen)
    curves = [(heading, lines.curves_of(shown, group, chosen, x, y)) for heading, group in choice.panels(rows, chosen)]
    curves = [(heading, by_label) for heading, by_label in curves if by_label]
    if not curves:
        return None
    figure, axes = style.figure(2 * len(curves), width=4.4)
    numbers = lines.numbers(curves)
    for (heading, by_label), rate, ratio in zip(curves, axes[::2], axes[1::2], strict=True):
        for label, points in by_label.items():
            lines.draw(rate, points, numbers[label], label)
            lines.draw(ratio, _relative(points), numbers[label], label)
        _ideal(ratio, list(by_label.values()))
        lines.finish(rate, choice.heading(x), choice.heading(y), heading, by_label)
        lines.finish(ratio, choice.heading(x), "speed-up", heading, by_label)
    return figure


def _relative(points: Sequence[Point]) -> list[Point]:
    """Divided by the first; the spread is that of the point alone. Empty if the first is no size to divide by."""
    first = points[0]
    if first.x <= 0 or not first.y > 0:
        return []
    return [
        Point(point.x, point.y / first.y, point.spread / first.y if point.spread is not None else None)
        for point in points
    ]


def _ideal(axes: Any, curves: Sequence[Sequence[Point]]) -> None:
    """As many times as fast as x is larger, from each first x."""
    for number, start in enumerate(sorted({points[0].x for points in curves if points[0].x > 0})):
        end = max(point.x for points in curves for point in points if points[0].x == start)
        with style.styled():
            axes.plot(
                [start, end],
                [1, end / start],
                color="#888888",
                linestyle=":",
                label="_" if number else "ideal speed-up",
            )
