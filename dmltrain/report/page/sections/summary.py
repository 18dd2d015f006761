"""One row for each run: the columns of `dmltrain-parse --summary` that any run has a value for."""

from __future__ import annotations

import math

from dmltrain.report.page.html import NOTHING, HtmlCell, table
from dmltrain.report.page.sections.section import Context, Section
from dmltrain.report.page.source import PageRun
from dmltrain.report.summaries.summary import COLUMNS, Column, Value, summary


def section(context: Context) -> Section | None:
    if not context.runs:
        return None
    rows = [summary(shown.run, known=shown.facts) for shown in context.runs]
    columns = [
        column
        for column in sorted(COLUMNS.values(), key=lambda column: column.importance)
        if column.name != "run" and any(row[column.name] is not None for row in rows)
    ]
    rows_of_runs = table(
        "Summary of the runs. Rates and means leave out a run's first epoch, which includes the start-up",
        ["run", *(column.heading for column in columns)],
        [
            [_name(shown), *(_cell(column, row[column.name]) for column in columns)]
            for shown, row in zip(context.runs, rows, strict=True)
        ],
    )
    return Section("Summary", [rows_of_runs])


def _name(shown: PageRun) -> HtmlCell:
    return HtmlCell(shown.label, run=shown.number)


def _cell(column: Column, value: Value) -> HtmlCell:
    if value is None:
        return NOTHING
    number = isinstance(value, int | float) and not isinstance(value, bool)
    sort = float(value) if number and math.isfinite(float(value)) else None
    return HtmlCell(column.show(value), sort, number)
