"""The machines, and the versions of what ran on them."""

from __future__ import annotations

from dmltrain.report.page.html import NOTHING, HtmlCell, table
from dmltrain.report.page.sections.section import Context, Section


def section(context: Context) -> Section | None:
    blocks = [block for block in (_machines(context), _versions(context)) if block]
    return Section("Machines and versions", blocks) if blocks else None


def _machines(context: Context) -> str:
    rows = [
        [
            HtmlCell(machine.name),
            HtmlCell(machine.processor),
            HtmlCell(str(machine.cores), machine.cores, True) if machine.cores is not None else NOTHING,
            HtmlCell(f"{machine.memory:g}", machine.memory, True) if machine.memory is not None else NOTHING,
            HtmlCell(machine.system),
            HtmlCell(", ".join(machine.devices)),
            HtmlCell(shown.label, run=shown.number),
        ]
        for shown in context.runs
        for machine in shown.facts.machines
    ]
    headings = ["machine", "processor", "cores", "memory GiB", "system", "GPUs", "run"]
    return _without_empty("Machines that ran workers", headings, rows)


def _versions(context: Context) -> str:
    names = list(dict.fromkeys(name for shown in context.runs for name in shown.facts.versions))
    rows = [
        [HtmlCell(shown.label, run=shown.number), *(HtmlCell(shown.facts.versions.get(name, "")) for name in names)]
        for shown in context.runs
        if shown.facts.versions
    ]
    return _without_empty("Versions", ["run", *names], rows)


def _without_empty(caption: str, headings: list[str], rows: list[list[HtmlCell]]) -> str:
    """The table without columns that are empty in each row; "" without rows."""
    kept = [place for place in range(len(headings)) if any(row[place].shown for row in rows)]
    return (
        table(caption, [headings[place] for place in kept], [[row[place] for place in kept] for row in rows])
        if rows
        else ""
    )
