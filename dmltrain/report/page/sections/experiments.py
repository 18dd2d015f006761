"""The results of an experiment: its table, its plots, and published results beside it."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence

from dmltrain.report.page import experiment
from dmltrain.report.page.experiment import CELLS, ExperimentOnPage, PageRow, PublishedOnPage, Value
from dmltrain.report.page.html import NOTHING, Content, HtmlCell, element, table
from dmltrain.report.page.sections.section import Context, Section


def section(context: Context) -> Section | None:
    blocks = [block for experiment in context.sources.experiments for block in _blocks(context, experiment)]
    return Section("Results of the experiment", blocks) if blocks else None


def _blocks(context: Context, shown: ExperimentOnPage) -> list[Content]:
    blocks: list[Content] = [element("h3", shown.title)]
    if shown.small and not any(shown.small in sentence for sentence in shown.caption):
        blocks.append(element("p", f"Made small: {shown.small}", class_="note"))
    blocks += [element("p", " ".join(shown.caption), class_="note")] if shown.caption else []
    blocks.append(_table(context, shown))
    blocks += [element("p", sentence) for sentence in shown.sentences]
    blocks += [block for published in shown.published for block in _published(shown, published)]
    blocks += [_plot(content, title) for content, title in experiment.plots(shown)]
    return blocks


def _table(context: Context, shown: ExperimentOnPage) -> Content:
    columns = shown.columns or {name: name for name in _names(shown.rows)}
    rows = [
        [*(_cell(row, name) for name in columns), HtmlCell(_status(row), link=_log(context, shown, row))]
        for row in shown.rows
    ]
    caption = "Results. ± is the spread over seeds, n how many were measured; without both it was measured once"
    return table(caption, [*columns.values(), "status"], rows)


def _status(row: PageRow) -> str:
    return f"error: {row.error}" if row.error else row.status


def _names(rows: Sequence[PageRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in (*row.settings, *row.values)))


def _cell(row: PageRow, name: str) -> HtmlCell:
    if name in row.values:
        return _value(row.values[name])
    return HtmlCell(row.settings[name]) if name in row.settings else NOTHING


def _value(value: Value) -> HtmlCell:
    if not isinstance(value.mean, float):
        return HtmlCell(value.mean or "")
    spread = f" ± {value.spread:.2g} (n={value.count})" if value.spread is not None else ""
    return HtmlCell(f"{value.mean:.6g}{spread}", value.mean, True)


def _log(context: Context, shown: ExperimentOnPage, row: PageRow) -> str | None:
    """The log of a row's cell that failed; else the folder of its first cell."""
    if row.log and os.path.isfile(path := os.path.join(shown.path, row.log)):
        return context.link(path)
    folders = [os.path.join(shown.path, CELLS, cell) for cell in row.cells]
    folder = next((folder for folder in folders if os.path.isdir(folder)), None)
    return context.link(folder) + "/" if folder else None


def _published(shown: ExperimentOnPage, published: PublishedOnPage) -> list[Content]:
    names = list(dict.fromkeys(name for row in published.rows for name in row))
    rows = [[_figure(*row.get(name, ("", ""))) for name in names] for row in published.rows]
    caption = ". ".join(filter(None, (f"Published: {published.title}", published.source, published.note)))
    return [table(caption, [shown.columns.get(name, name.replace("_", " ")) for name in names], rows)] if rows else []


def _figure(shown: str, error: str) -> HtmlCell:
    """A figure, with what was wrong with it as it was printed."""
    return HtmlCell(f"{shown} ({error})" if error else shown)


def _plot(content: bytes, title: str) -> Content:
    """A plot as an image: it can run no script."""
    data = base64.b64encode(content).decode("ascii")
    image = element("img", src=f"data:image/svg+xml;base64,{data}", alt=f"plot: {title}", loading="lazy")
    return element("figure", image, element("figcaption", title), class_="plot")
