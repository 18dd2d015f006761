"""Where the time of an epoch went, one bar a row: compute, own host, wire, server, straggler."""

from __future__ import annotations

from typing import Any

from dmltrain.experiment.results.cell import ResultRow
from dmltrain.experiment.results.measured import is_number
from dmltrain.experiment.results.plots import choice, lines
from dmltrain.experiment.results.plots.choice import Chosen, PlotData
from dmltrain.report import style

TITLE = "Where the time went"
CHOICES = {"y": choice.one_of("seconds", "share")}
PARTS = ("compute", "own_host", "wire", "server", "straggler")
INCHES = 0.24  # of a bar


def draw(shown: PlotData, chosen: Chosen) -> Any:
    """Seconds of an epoch (the default) or shares of it; the mean over seeds. The series name the bars."""
    share = chosen.get("y") == "share"
    rows = [row for row in shown.rows(chosen) if _parts(shown, row, share)]
    if not rows:
        return None
    panels = choice.panels(rows, chosen)
    most = max(len(group) for _, group in panels)
    figure, axes = style.figure(len(panels), width=6.4 if len(panels) == 1 else 4.6, height=0.9 + INCHES * most)
    names = choice.series_names(rows, chosen, ())
    choice.check_apart(rows, chosen, names)
    for (heading, group), panel in zip(panels, axes, strict=True):
        labels = [choice.series_label(names, next(iter(choice.grouped([row], names)))) or "all" for row in group]
        _bars(panel, [_parts(shown, row, share) for row in group], labels)
        style.finish(panel, "share of an epoch" if share else "seconds of an epoch", "")
        panel.grid(visible=False, axis="y")
        lines.title(panel, heading)
    return figure


def _parts(shown: PlotData, row: ResultRow, share: bool) -> list[float]:
    """The sizes of PARTS; [] if the logs do not say them."""
    values = [shown.measured(row, part).mean for part in PARTS]
    whole = 1.0 if share else shown.measured(row, "seconds_per_epoch").mean
    if not all(map(is_number, (*values, whole))):
        return []
    sizes = [float(value) * float(whole) for value in values]  # type: ignore[arg-type]
    return sizes if all(map(choice.drawable, sizes)) else []


def _bars(axes: Any, rows: list[list[float]], labels: list[str]) -> None:
    places = list(range(len(rows)))
    left = [0.0] * len(rows)
    with style.styled():
        for number, part in enumerate(PARTS):
            widths = [row[number] for row in rows]
            name = part.replace("_", " ")
            axes.barh(places, widths, 0.8, left=left, color=style.colour(number), label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(places, [style.text(label) for label in labels])
        axes.invert_yaxis()  # the first row on top
