"""The results of an experiment: its table, its plots, and published results beside it."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence

from dmltrain.report.page import experiment
from dmltrain.report.page.experiment import CELLS, Experiment, Published, Row, Value
from dmltrain.report.page.html import NOTHING, Cell, Content, element, table
from dmltrain.report.page.sections.section import Context, Section


def section(context: Context) -> Section | None:
    blocks = [block for experiment in context.sources.experiments for block in _blocks(context, experiment)]
    return Section("Results of the experiment", blocks) if blocks else None


def _blocks(context: Context, shown: Experiment) -> list[Content]:
    blocks: list[Content] = [element("h3", shown.title)]
    if shown.small and not any(shown.small in sentence for sentence in shown.caption):
        blocks.append(element("p", f"Made small: {shown.small}", class_="note"))
    blocks += [element("p", " ".join(shown.caption), class_="note")] if shown.caption else []
    blocks.append(_table(context, shown))
    blocks += [element("p", sentence) for sentence in shown.sentences]
    blocks += [block for one in shown.published for block in _published(shown, one)]
    blocks += [_plot(content, title) for content, title in experiment.plots(shown)]
    return blocks


def _table(context: Context, shown: Experiment) -> Content:
    columns = shown.columns or {name: name for name in _names(shown.rows)}
    rows = [
        [*(_cell(row, name) for name in columns), Cell(_status(row), link=_log(context, shown, row))]
        for row in shown.rows
    ]
    caption = "Results. ± is the spread over seeds, n how many were measured; without both it was measured once"
    return table(caption, [*columns.values(), "status"], rows)


def _status(row: Row) -> str:
    return f"error: {row.error}" if row.error else row.status


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in (*row.settings, *row.values)))


def _cell(row: Row, name: str) -> Cell:
    if name in row.values:
        return _value(row.values[name])
    return Cell(row.settings[name]) if name in row.settings else NOTHING


def _value(value: Value) -> Cell:
    if not isinstance(value.mean, float):
        return Cell(value.mean or "")
    spread = f" ± {value.spread:.2g} (n={value.count})" if value.spread is not None else ""
    return Cell(f"{value.mean:.6g}{spread}", value.mean, True)


def _log(context: Context, shown: Experiment, row: Row) -> str | None:
    """The log of a row's cell that failed; else the folder of its first cell."""
    if row.log and os.path.isfile(path := os.path.join(shown.path, row.log)):
        return context.link(path)
    folders = [os.path.join(shown.path, CELLS, cell) for cell in row.cells]
    found = next((folder for folder in folders if os.path.isdir(folder)), None)
    return context.link(found) + "/" if found else None


def _published(shown: Experiment, one: Published) -> list[Content]:
    names = list(dict.fromkeys(name for row in one.rows for name in row))
    rows = [[_figure(*row.get(name, ("", ""))) for name in names] for row in one.rows]
    caption = ". ".join(filter(None, (f"Published: {one.title}", one.source, one.note)))
    return [table(caption, [shown.columns.get(name, name.replace("_", " ")) for name in names], rows)] if rows else []


def _figure(shown: str, error: str) -> Cell:
    """A figure, with what was wrong with it as it was printed."""
    return Cell(f"{shown} ({error})" if error else shown)


def _plot(content: bytes, title: str) -> Content:
    """A plot as an image: it can run no script."""
    data = base64.b64encode(content).decode("ascii")
    image = element("img", src=f"data:image/svg+xml;base64,{data}", alt=f"plot: {title}", loading="lazy")
    return element("figure", image, element("figcaption", title), class_="plot")
