"""The exact commands, and the options that differ between runs."""

from __future__ import annotations

from dmltrain.report.page.html import Content, HtmlCell, element, join, mark, table
from dmltrain.report.page.sections.section import Context, Section

MOST_OPTIONS = 60


def section(context: Context) -> Section | None:
    blocks: list[Content] = []
    for shown in context.runs:
        command = shown.facts.command
        if command:
            blocks.append(join([element("h3", mark(shown.number), shown.label), element("pre", command, tabindex="0")]))
    blocks += _differences(context)
    return Section("Commands and options", blocks) if blocks else None


def _differences(context: Context) -> list[Content]:
    """A table of the options that are not the same in all runs."""
    runs = [shown for shown in context.runs if shown.facts.options]
    names = list(dict.fromkeys(name for shown in runs for name in shown.facts.options))
    differing = [name for name in names if len({repr(shown.facts.options.get(name)) for shown in runs}) > 1]
    if len(runs) < 2 or not differing:
        return []
    rows = [
        [
            HtmlCell(shown.label, run=shown.number),
            *(_cell(shown.facts.options.get(name)) for name in differing[:MOST_OPTIONS]),
        ]
        for shown in runs
    ]
    left = len(differing) - MOST_OPTIONS
    caption = "Options that differ" + (f" (the first {MOST_OPTIONS}, {left} more differ)" if left > 0 else "")
    return [table(caption, ["run", *differing[:MOST_OPTIONS]], rows)]


def _cell(value: object) -> HtmlCell:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return HtmlCell("" if value is None else str(value), float(value) if number else None, number)  # type: ignore[arg-type]
