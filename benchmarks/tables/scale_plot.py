"""The scale benchmark's plot: a step's time over each axis, with the bound, in the project's style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.report import style

LABELS = {"workers": "workers", "servers": "servers", "keys": "keys", "megabytes": "model, MB"}
LINES = {
    "time": lambda entry: entry["seconds"]["median"],
    "bound": lambda entry: entry["bound_seconds"],
    "slices without their bytes": lambda entry: entry["slices_alone"]["seconds"],
}
DASHED = ("bound",)  # it is computed, not measured


class PlotFailed(Exception):
    """The plot failed; the message has the reason and the fix."""


def require() -> None:
    """Raise PlotFailed before the measurement if matplotlib is missing."""
    try:
        style.figure()
    except UserError as error:
        raise PlotFailed(f"--plot: {error}") from None


def save(rows: Sequence[dict], path: str) -> None:
    """Draw one panel for each axis through the first row, the base. `path` ends with the format. Raises PlotFailed."""
    require()
    figure, panels = style.figure(len(LABELS), width=2.6, height=2.6, sharey=True)
    for axes, axis in zip(panels, LABELS, strict=True):
        draw(axes, axis, series(rows, axis))
    panels[0].set_ylabel("ms a step")
    try:
        style.save(figure, path)
    except UserError as error:
        raise PlotFailed(f"--plot {error}") from None


def series(rows: Sequence[dict], axis: str) -> list[dict]:
    """The rows that differ from the base only in this axis, in its order."""
    same = [row for row in rows if all(row[other] == rows[0][other] for other in LABELS if other != axis)]
    return sorted(same, key=lambda row: row[axis])


def draw(axes: Any, axis: str, rows: Sequence[dict]) -> None:
    """One panel."""
    places = [row[axis] for row in rows]
    axes.set(xscale="log", yscale="log")
    for number, (label, value) in enumerate(LINES.items()):
        style.curve(axes, places, [value(row) * 1e3 for row in rows], number, label, dashed=label in DASHED)
    style.finish(axes, LABELS[axis], "")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
