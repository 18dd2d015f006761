"""Accuracy, error or loss of every setting over epochs, time or iterations: the mean of the seeds, and their range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dmltrain.experiment.results.cell import MeasuredCell, ResultRow
from dmltrain.experiment.results.plots import choice, lines
from dmltrain.experiment.results.plots.choice import Chosen, PlotData
from dmltrain.report import style
from dmltrain.report.runs.facts import facts
from dmltrain.report.summaries import series
from dmltrain.report.summaries.measured import ACCURACY, LOSSES

TITLE = "Learning curves"
KEYS: dict[str, tuple[str, ...]] = {  # choice -> the report's keys, the first that a log has
    "validation_accuracy": (ACCURACY,),
    "test_error": (series.TEST_ERROR,),
    "train_accuracy": ("train_accuracy",),
    "train_loss": ("train_cross_entropy", "train_loss", "train_nll_loss"),
    "validation_loss": LOSSES,
    "seconds": ("seconds",),
}
CHOICES = {
    "x": choice.one_of(*series.AXES),  # epoch if not chosen
    "y": choice.one_of(*KEYS),  # validation_accuracy if not chosen
    "log": choice.switch,  # a logarithmic y
}

Curve = Sequence[tuple[float, float]]  # x, y of each epoch


def draw(shown: PlotData, chosen: Chosen) -> Any:
    """One curve for each setting, in one panel or one for each value of `panels`."""
    x, y = chosen.get("x", "epoch"), chosen.get("y", "validation_accuracy")
    rows = [row for row in shown.rows(chosen) if _curves(row, x, y)]
    if not rows:
        return None
    panels = choice.panels(rows, chosen)
    figure, axes = style.figure(len(panels), width=5.6 if len(panels) == 1 else 4.6, sharey=True)
    names = choice.series_names(rows, chosen, ())
    choice.check_apart(rows, chosen, names)
    numbers = {values: number for number, values in enumerate(choice.grouped(rows, names))}
    for (heading, group), panel in zip(panels, axes, strict=True):
        for values, same in choice.grouped(group, names).items():
            _draw(panel, [curve for row in same for curve in _curves(row, x, y)], numbers[values], names, values)
        style.finish(panel, series.AXES[x], y.replace("_", " "), whole=x != "time")
        lines.title(panel, heading)
        if chosen.get("log"):
            panel.set_yscale("log")
    return figure


def _draw(axes: Any, curves: Sequence[Curve], number: int, names: Sequence[str], values: Sequence[Any]) -> None:
    """The mean of the curves as far as all go, with a band from the lowest to the highest."""
    epochs = list(zip(*curves, strict=False))
    xs = [_mean([x for x, _ in points]) for points in epochs]
    ys = [[y for _, y in points] for points in epochs]
    style.curve(axes, xs, [_mean(values_at) for values_at in ys], number, choice.series_label(names, values) or "all")
    if len(curves) > 1:
        style.band(axes, xs, [min(values_at) for values_at in ys], [max(values_at) for values_at in ys], number)


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _curves(row: ResultRow, x: str, y: str) -> list[Curve]:
    return [curve for cell in row.done() if (curve := _curve(cell, x, y))]


def _curve(cell: MeasuredCell, x: str, y: str) -> Curve:
    """The finite points of a cell; [] if its log has none."""
    if cell.run is None:
        return []
    known = facts(cell.run)
    points = next((points for key in KEYS[y] if (points := series.points(cell.run, key, x, known=known))), [])
    return [point for point in points if all(map(choice.drawable, point))]
