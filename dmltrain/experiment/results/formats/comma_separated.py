"""An outcome as CSV, for programs: numbers that are not rounded, spread and count in columns of their own.

One line a row, published ones after one's own; also for a table with runs in columns. An unknown value is empty.
"""

from __future__ import annotations

import csv
import io

from dmltrain.experiment.results.cell import plain
from dmltrain.experiment.results.outcome import Outcome, TableLine
from dmltrain.experiment.results.published import Published, PublishedRow
from dmltrain.experiment.results.value_text import exact
from dmltrain.report.summaries.spreadsheet import quoted

FIRST = ("source", "status", "seeds")  # title of the published results, or nothing; state of the row; its cells
LAST = ("cells", "error")


def text(outcome: Outcome) -> str:
    """The whole file."""
    written = io.StringIO()
    settings = _settings(outcome)
    lines = csv.DictWriter(written, [*FIRST, *settings, *_headings(outcome), *LAST], restval="", lineterminator="\n")
    lines.writeheader()
    rows = [_own_row(line, outcome, settings) for line in outcome.lines]
    rows += [_published(published, row, outcome, settings) for published in outcome.published for row in published.rows]
    lines.writerows({name: quoted(value) for name, value in row.items()} for row in rows)
    return written.getvalue()


def _settings(outcome: Outcome) -> list[str]:
    """The variables that are not a column anyway."""
    columns = {plain(column.key) for column in outcome.columns}
    names = dict.fromkeys(name for row in outcome.rows for name in row.settings)
    return [name for name in names if plain(name) not in columns]


def _headings(outcome: Outcome) -> list[str]:
    return [
        heading
        for column in outcome.columns
        for heading in ((column.key, *_more(column.key)) if column.measured else (column.key,))
    ]


def _more(key: str) -> tuple[str, str]:
    return f"{key} spread", f"{key} count"


def _own_row(line: TableLine, outcome: Outcome, settings: list[str]) -> dict[str, str]:
    row = line.row
    cells = {"status": row.status, "seeds": str(len(row.cells)), "cells": " ".join(cell.id for cell in row.cells)}
    cells |= {name: exact(row.settings.get(name)) for name in settings}
    for column in outcome.columns:
        value = line.values[column.key]
        cells[column.key] = exact(value.mean)
        if column.measured:
            spread, count = _more(column.key)
            cells |= {spread: exact(value.spread), count: str(value.count)}
    return cells | {"error": "; ".join(cell.error for cell in row.cells if cell.error)}


def _published(published: Published, row: PublishedRow, outcome: Outcome, settings: list[str]) -> dict[str, str]:
    keys = {*settings, *(column.key for column in outcome.columns)}
    cells = {key: exact(figure.value) for key, figure in row.figures.items() if key in keys}
    errors = "; ".join(f"{key}: {figure.error}" for key, figure in row.figures.items() if figure.error)
    return cells | {"source": published.title, "status": "published", "error": errors}
