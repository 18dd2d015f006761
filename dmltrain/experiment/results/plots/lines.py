"""Curves of rows: one value over another, with the spread over seeds as error bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmltrain.experiment.results.cell import ResultRow
from dmltrain.experiment.results.measured import is_number
from dmltrain.experiment.results.plots import choice
from dmltrain.experiment.results.plots.choice import Chosen, PlotData
from dmltrain.report import style


@dataclass(frozen=True)
class Point:
    """spread: None if it was measured once."""

    x: float
    y: float
    spread: float | None = None


Curves = Mapping[str, Sequence[Point]]  # by label


def curves_of(shown: PlotData, rows: Sequence[ResultRow], chosen: Chosen, x: str, y: str) -> dict[str, list[Point]]:
    """The curves of `rows`, one for each series, points from left to right. Points without a number are left out."""
    names = choice.series_names(rows, chosen, _axis(rows, x))
    if x in choice.varying(rows):
        choice.check_apart(rows, chosen, (x, *names))
    curves: dict[str, list[Point]] = {}
    for values, group in choice.grouped(rows, names).items():
        points = [point for row in group if (point := _point(shown, row, x, y))]
        if points:
            curves[choice.series_label(names, values)] = sorted(points, key=lambda point: point.x)
    return curves


def _axis(rows: Sequence[ResultRow], x: str) -> set[str]:
    """The variables that go along with x: x itself, and those which decide workers x devices."""
    if x != "processors":
        return {x}
    return {"workers", "servers", "devices", "hosts", "nodes", "machines", "gpus"}


def _point(shown: PlotData, row: ResultRow, x: str, y: str) -> Point | None:
    place, value = shown.setting(row, x), shown.measured(row, y)
    if not is_number(place) or not is_number(value.mean):
        return None
    across, up = float(place), float(value.mean)  # type: ignore[arg-type]
    return Point(across, up, value.spread) if choice.drawable(across) and choice.drawable(up) else None


def numbers(panels: Iterable[tuple[str, Curves]]) -> dict[str, int]:
    """A number for each label, the same in all panels: its colour and marker."""
    labels = dict.fromkeys(label for _, curves in panels for label in curves)
    return {label: number for number, label in enumerate(labels)}


def draw(axes: Any, points: Sequence[Point], number: int, label: str) -> None:
    """Draw a curve with its error bars."""
    if not points:
        return
    style.curve(axes, [point.x for point in points], [point.y for point in points], number, label)
    errors(axes, [point for point in points if point.spread is not None and math.isfinite(point.spread)], number)


def errors(axes: Any, points: Sequence[Point], number: int) -> None:
    if points:
        xs, ys, spreads = zip(*[(point.x, point.y, point.spread) for point in points], strict=True)
        with style.styled():
            axes.errorbar(xs, ys, yerr=spreads, fmt="none", ecolor=style.colour(number), capsize=2.5, label="_")


def finish(axes: Any, x: str, y: str, heading: str, curves: Curves) -> None:
    """Name the axes; y starts at 0, and x has whole numbers if all are."""
    style.finish(axes, x, y, whole=all(point.x.is_integer() for points in curves.values() for point in points))
    title(axes, heading)
    axes.set_ylim(bottom=0)


def title(axes: Any, heading: str) -> None:
    if heading:
        with style.styled():
            axes.set_title(style.text(heading), fontsize=9)
