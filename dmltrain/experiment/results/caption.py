"""The caption of an experiment's tables: how often everything was measured, on what, when, and what was made small.

Everything is from the stored records of the cells, nothing from the clock or this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dmltrain.experiment.result import DONE, ERROR, PENDING, RUNNING
from dmltrain.experiment.results import derived
from dmltrain.experiment.results.cell import SEED, Cell, Row
from dmltrain.experiment.results.column import Column
from dmltrain.experiment.results.derived import SpeedUp
from dmltrain.experiment.results.measured import Value
from dmltrain.experiment.results.published import Published
from dmltrain.experiment.results.shown import exact
from dmltrain.report.summaries.summary import COLUMNS

EMULATED = {  # option -> in words
    "emulate-step": "each step takes at least {} s",
    "emulate-sample": "each sample takes at least {} s",
    "stragglers": "stragglers {}",
}


def caption(
    rows: Sequence[Row],
    columns: Sequence[Column],
    speed_up: SpeedUp,
    published: Sequence[Published] = (),
    small: str = "",
    changed: str = "",
) -> tuple[str, ...]:
    """Its sentences."""
    cells = [cell for row in rows for cell in row.cells]
    names = {column.name for column in columns}
    sentences = [
        _count(rows),
        _states(cells),
        f"Made small: {small}." if small else "",
        f"Set on the command line: {changed}." if changed else "",
        *_emulated(cells),
        _times(names, cells),
        _baseline(rows, speed_up) if names & {"speed_up", "efficiency"} else "",
        _machine(cells),
        _versions(cells),
        _dates(cells),
        *(_published(one) for one in published),
    ]
    return tuple(filter(None, sentences))


def machines(cells: Iterable[Cell]) -> list[str]:
    """The machines of all cells that are done, each once; `unknown` where a log does not say."""
    return list(dict.fromkeys(cell.record.machine or "unknown" for cell in cells if cell.status == DONE))


def emulated(cell: Cell) -> bool:
    """Whether the cell's computing was emulated."""
    return any(_given(cell.options.get(name)) for name in EMULATED)


def _given(value: Value) -> bool:
    """Whether an option has an effect."""
    return value not in (None, 0, False, "")


def _count(rows: Sequence[Row]) -> str:
    cells, most = sum(len(row.cells) for row in rows), max((len(row.cells) for row in rows), default=0)
    if most <= 1:
        return f"{cells} cells, each measured once." if cells != 1 else "One cell, measured once."
    seeds = sorted({exact(cell.settings.get(SEED)) for row in rows for cell in row.cells}, key=_natural)
    return (
        f"{cells} cells: {len(rows)} settings with the seeds {', '.join(seeds)}; "
        "mean ± sample standard deviation, and in parentheses how many cells have the value; "
        "a number without ± was measured once."
    )


def _natural(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else 0, text)


def _states(cells: Sequence[Cell]) -> str:
    counts = Counter(cell.status for cell in cells)
    words = {ERROR: "failed", RUNNING: "running", PENDING: "pending"}
    said = [f"{counts[status]} {word}" for status, word in words.items() if counts[status]]
    return f"Not all cells are done: {', '.join(said)}." if said else ""


def _emulated(cells: Sequence[Cell]) -> list[str]:
    """One sentence for each option that emulates something."""
    found = []
    for name, words in EMULATED.items():
        values = [cell.options.get(name) for cell in cells]
        used = [exact(value) for value in values if _given(value)]
        if used:
            given = dict.fromkeys(used)
            where = "" if len(used) == len(cells) else f" in {len(used)} of {len(cells)} cells"
            found.append(f"Computing was emulated{where}: {words.format(' or '.join(given))} (--{name}).")
    return found


def _times(names: set[str], cells: Sequence[Cell]) -> str:
    epoch = names & {"seconds_per_epoch", "samples_per_second", "steps_per_second", "speed_up", "efficiency"}
    if not epoch:
        return ""
    single = any(cell.summary.get("epochs") == 1 for cell in cells)
    unless = ", unless it is the only one" if single else ""
    return f"Times and rates are means over the epochs of a run, without the first{unless}."


def _baseline(rows: Sequence[Row], speed_up: SpeedUp) -> str:
    found = derived.baselines(rows, speed_up)
    if not found:
        return "No speed-up: the baseline is not measured."
    of = COLUMNS[speed_up.of].heading if speed_up.of in COLUMNS else speed_up.of
    return f"Speed-up: {of} divided by those of {' or '.join(found)} with otherwise the same settings and seed."


def _machine(cells: Sequence[Cell]) -> str:
    found = machines(cells)
    return f"Machine: {found[0]}." if len(found) == 1 else ""


def _versions(cells: Sequence[Cell]) -> str:
    found = dict.fromkeys(version for cell in cells for version in cell.record.versions)
    return f"Versions: {', '.join(found)}." if found else ""


def _dates(cells: Sequence[Cell]) -> str:
    found = sorted({cell.record.date for cell in cells if cell.record.date})
    if not found:
        return ""
    return f"Measured on {found[0]}." if len(found) == 1 else f"Measured from {found[0]} to {found[-1]}."


def _published(one: Published) -> str:
    note = f" ({one.note})" if one.note else ""
    return f"Published: {one.title}{note}, {one.source}."
