"""The caption of an experiment's tables: how often everything was measured, on what, when, and what was made small.

Everything is from the stored records of the cells, nothing from the clock or this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dmltrain.experiment.result import DONE, ERROR, PENDING, RUNNING
from dmltrain.experiment.results import derived
from dmltrain.experiment.results.cell import SEED, MeasuredCell, ResultRow
from dmltrain.experiment.results.column import ResultColumn
from dmltrain.experiment.results.derived import SpeedUp
from dmltrain.experiment.results.measured import Value
from dmltrain.experiment.results.published import Published
from dmltrain.experiment.results.value_text import exact
from dmltrain.report.summaries.summary import COLUMNS

EMULATED = {  # option -> in words
    "emulate-step": "each step takes at least {} s",
    "emulate-sample": "each sample takes at least {} s",
    "stragglers": "stragglers {}",
}


def caption(
    rows: Sequence[ResultRow],
    columns: Sequence[ResultColumn],
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
        *(_published(published_table) for published_table in published),
    ]
    return tuple(filter(None, sentences))


def machines(cells: Iterable[MeasuredCell]) -> list[str]:
    """The machines of all cells that are done, each once; `unknown` where a log does not say."""
    return list(dict.fromkeys(cell.record.machine or "unknown" for cell in cells if cell.status == DONE))


def emulated(cell: MeasuredCell) -> bool:
    """Whether the cell's computing was emulated."""
    return any(_given(cell.options.get(name)) for name in EMULATED)


def _given(value: Value) -> bool:
    """Whether an option has an effect."""
    return value not in (None, 0, False, "")


def _count(rows: Sequence[ResultRow]) -> str:
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


def _states(cells: Sequence[MeasuredCell]) -> str:
    counts = Counter(cell.status for cell in cells)
    words = {ERROR: "failed", RUNNING: "running", PENDING: "pending"}
    states = [f"{counts[status]} {word}" for status, word in words.items() if counts[status]]
    return f"Not all cells are done: {', '.join(states)}." if states else ""


def _emulated(cells: Sequence[MeasuredCell]) -> list[str]:
    """One sentence for each option that emulates something."""
    sentences = []
    for name, words in EMULATED.items():
        values = [cell.options.get(name) for cell in cells]
        used = [exact(value) for value in values if _given(value)]
        if used:
            given = dict.fromkeys(used)
            where = "" if len(used) == len(cells) else f" in {len(used)} of {len(cells)} cells"
            sentences.append(f"Computing was emulated{where}: {words.format(' or '.join(given))} (--{name}).")
    return sentences


def _times(names: set[str], cells: Sequence[MeasuredCell]) -> str:
    epoch = names & {"seconds_per_epoch", "samples_per_second", "steps_per_second", "speed_up", "efficiency"}
    if not epoch:
        return ""
    single = any(cell.summary.get("epochs") == 1 for cell in cells)
    unless = ", unless it is the only one" if single else ""
    return f"Times and rates are means over the epochs of a run, without the first{unless}."


def _baseline(rows: Sequence[ResultRow], speed_up: SpeedUp) -> str:
    baselines = derived.baselines(rows, speed_up)
    if not baselines:
        return "No speed-up: the baseline is not measured."
    of = COLUMNS[speed_up.of].heading if speed_up.of in COLUMNS else speed_up.of
    return f"Speed-up: {of} divided by those of {' or '.join(baselines)} with otherwise the same settings and seed."


def _machine(cells: Sequence[MeasuredCell]) -> str:
    names = machines(cells)
    return f"Machine: {names[0]}." if len(names) == 1 else ""


def _versions(cells: Sequence[MeasuredCell]) -> str:
    versions = dict.fromkeys(version for cell in cells for version in cell.record.versions)
    return f"Versions: {', '.join(versions)}." if versions else ""


def _dates(cells: Sequence[MeasuredCell]) -> str:
    dates = sorted({cell.record.date for cell in cells if cell.record.date})
    if not dates:
        return ""
    return f"Measured on {dates[0]}." if len(dates) == 1 else f"Measured from {dates[0]} to {dates[-1]}."


def _published(published: Published) -> str:
    note = f" ({published.note})" if published.note else ""
    return f"Published: {published.title}{note}, {published.source}."
