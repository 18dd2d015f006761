"""The machines, and the versions of what ran on them."""

from __future__ import annotations

from dmltrain.report.page.html import NOTHING, Cell, table
from dmltrain.report.page.sections.section import Context, Section


def section(context: Context) -> Section | None:
    blocks = [made for made in (_machines(context), _versions(context)) if made]
    return Section("Machines and versions", blocks) if blocks else None


def _machines(context: Context) -> str:
    rows = [
        [
            Cell(machine.name),
            Cell(machine.processor),
            Cell(str(machine.cores), machine.cores, True) if machine.cores is not None else NOTHING,
            Cell(f"{machine.memory:g}", machine.memory, True) if machine.memory is not None else NOTHING,
            Cell(machine.system),
            Cell(", ".join(machine.devices)),
            Cell(shown.label, run=shown.number),
        ]
        for shown in context.runs
        for machine in shown.facts.machines
    ]
    headings = ["machine", "processor", "cores", "memory GiB", "system", "GPUs", "run"]
    return _without_empty("Machines that ran workers", headings, rows)


def _versions(context: Context) -> str:
    names = list(dict.fromkeys(name for shown in context.runs for name in shown.facts.versions))
    rows = [
        [Cell(shown.label, run=shown.number), *(Cell(shown.facts.versions.get(name, "")) for name in names)]
        for shown in context.runs
        if shown.facts.versions
    ]
    return _without_empty("Versions", ["run", *names], rows)


def _without_empty(caption: str, headings: list[str], rows: list[list[Cell]]) -> str:
    """The table without columns that are empty in each row; "" without rows."""
    kept = [place for place in range(len(headings)) if any(row[place].shown for row in rows)]
    return (
        table(caption, [headings[place] for place in kept], [[row[place] for place in kept] for row in rows])
        if rows
        else ""
    )
