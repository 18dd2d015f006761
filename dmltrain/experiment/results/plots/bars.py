"""Bars of one value, in groups: by default one group for each value of the first variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmltrain.experiment.results.cell import ResultRow
from dmltrain.experiment.results.measured import Measured, Value, is_number
from dmltrain.experiment.results.plots import choice, lines
from dmltrain.experiment.results.plots.choice import Chosen, PlotData
from dmltrain.experiment.results.plots.lines import Point
from dmltrain.experiment.results.value_text import exact
from dmltrain.report import style

TITLE = ""  # that of y
CHOICES = {"x": choice.variable, "y": choice.name}  # the first variable that varies, and samples_per_second
ROOM = 0.8  # of the distance of two groups
INCHES = 0.16  # of a bar
HATCHES = ("", "///", "...", "xxx")  # of as many series as there are colours, of the next ones, ...
_DARK = 6  # the style's black


def draw(shown: PlotData, chosen: Chosen) -> Any:
    """One panel, or one for each value of `panels`."""
    rows = shown.rows(chosen)
    y = chosen.get("y", "samples_per_second")
    rows = [row for row in rows if _finite(shown.measured(row, y))]
    if not rows:
        return None
    x = chosen.get("x") or next(iter(choice.varying(rows)), next(iter(rows[0].settings), ""))
    panels = choice.panels(rows, chosen)
    most = max(len(group) for _, group in panels)
    figure, axes = style.figure(len(panels), width=max(4.0, 1.2 + INCHES * 1.6 * most), sharey=True)
    names = choice.series_names(rows, chosen, (x,))
    choice.check_apart(rows, chosen, (x, *names))
    numbers = {values: number for number, values in enumerate(choice.grouped(rows, names))}
    for (heading, group), panel in zip(panels, axes, strict=True):
        _panel(panel, shown, group, names, x, y, numbers)
        style.finish(panel, choice.heading(x), choice.heading(y))
        panel.grid(visible=False, axis="x")
        lines.title(panel, heading)
    return figure


def _panel(
    axes: Any,
    shown: PlotData,
    rows: Sequence[ResultRow],
    names: Sequence[str],
    x: str,
    y: str,
    numbers: Mapping[tuple[Value, ...], int],
) -> None:
    beside = {values[0]: group for values, group in choice.grouped(rows, (x,)).items()}
    width = ROOM / max(map(len, beside.values()))
    for values, group in choice.grouped(rows, names).items():
        label = choice.series_label(names, values)
        points = [_bar(shown, row, list(beside.values()), y, width) for row in group]
        with style.styled():
            axes.bar(
                [point.x for point in points],
                [point.y for point in points],
                width * 0.92,
                color=style.colour(numbers[values]),
                hatch=HATCHES[numbers[values] // len(style.COLOURS) % len(HATCHES)],
                edgecolor="white",
                linewidth=0,
                label=style.text(label) if label else "_",
            )
        lines.errors(axes, [point for point in points if point.spread is not None], _DARK)
    with style.styled():
        axes.set_xticks(range(len(beside)), [style.text(exact(value) or "none") for value in beside])


def _bar(shown: PlotData, row: ResultRow, groups: Sequence[Sequence[ResultRow]], y: str, width: float) -> Point:
    """The top of a row's bar; the bars of a group stand side by side around its place."""
    place, group = next((place, group) for place, group in enumerate(groups) if row in group)
    value = shown.measured(row, y)
    shift = (group.index(row) - (len(group) - 1) / 2) * width
    return Point(place + shift, float(value.mean or 0), value.spread)


def _finite(value: Measured) -> bool:
    return is_number(value.mean) and choice.drawable(float(value.mean))  # type: ignore[arg-type]
