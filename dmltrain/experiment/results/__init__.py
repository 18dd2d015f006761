"""The results of an experiment: its table in every format, its plots, and published results beside them.

    reading        the log folder of each cell -> MeasuredCell
    cell, measured cells that differ in their seed -> one Row; mean and spread of its values
    column         what a column shows; derived: speed-up, efficiency, error rate
    published      results of others, with their errors marked
    sentence, caption  what stands under and over the table
    outcome        all of this as one value
    table, formats/    its text in each format; plots/: its plots

`check` finds mistakes before the first cell, `write` writes everything. Both are pure functions of the stored files:
written again, every file has the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain.base import whole_file
from dmltrain.base.errors import UserError
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.result import Result
from dmltrain.experiment.results import derived, reading
from dmltrain.experiment.results.caption import caption, machines
from dmltrain.experiment.results.cell import MeasuredCell, rows
from dmltrain.experiment.results.column import ResultColumn, columns
from dmltrain.experiment.results.formats import FORMATS
from dmltrain.experiment.results.outcome import Outcome, Picture, TableLine
from dmltrain.experiment.results.plots import Plot
from dmltrain.experiment.results.presentation import Presentation, names_of, presentation
from dmltrain.experiment.results.sentence import as_text

__all__ = ["check", "outcome", "write"]

PLOTS = "plots"
_OURS = re.compile(r"\d+-[a-z0-9-]+\.svg")  # the names of plots, as `plots` gives them


def check(experiment: Experiment) -> None:
    """UserError with file and line for a mistake in columns, plots, published results or sentences."""
    presentation(experiment)


def write(folder: Path, experiment: Experiment, results: Sequence[Result]) -> list[str]:
    """Write table.md, table.csv, table.tex, results.json and plots/*.svg into the folder of results.

    Returns notes for the user, such as a plot that has nothing to draw. Passes on OSError; UserError as `check`.
    """
    shown = presentation(experiment)
    content = outcome(experiment, shown, reading.cells(folder, results))
    drawn, notes = _draw(shown.plots, content)
    pictures = tuple(Picture(f"{PLOTS}/{name}", title) for name, (title, _) in drawn.items())
    content = replace(content, pictures=pictures)
    _write_plots(folder / PLOTS, {name: svg for name, (_, svg) in drawn.items()})
    for name, text in FORMATS.items():
        whole_file.write(folder / name, text(content).encode("utf-8", "backslashreplace"))
    return notes


def outcome(experiment: Experiment, shown: Presentation, cells: Sequence[MeasuredCell]) -> Outcome:
    """The cells as everything that is shown of them."""
    all_rows = rows(cells)
    values = derived.derived(all_rows, shown.speed_up)
    columns = _with_machine(shown.columns, experiment, cells)
    return Outcome(
        title=experiment.title or experiment.name,
        columns=columns,
        lines=tuple(TableLine(row, {column.key: column.of(row, values) for column in columns}) for row in all_rows),
        derived=values,
        published=shown.published,
        caption=caption(all_rows, columns, shown.speed_up, shown.published, experiment.small, experiment.changed),
        sentences=tuple(filter(None, (as_text(sentence, all_rows, values) for sentence in shown.sentences))),
        small=experiment.small,
        transpose=shown.transpose,
    )


def _with_machine(
    shown: tuple[ResultColumn, ...], experiment: Experiment, cells: Sequence[MeasuredCell]
) -> tuple[ResultColumn, ...]:
    """A column for the machine where the cells ran on several; else the caption names it."""
    if len(machines(cells)) < 2 or any(column.name == "machine" for column in shown):
        return shown
    return (*shown, *columns(["machine"], names_of(experiment)))


def _draw(plots: Sequence[Plot], outcome: Outcome) -> tuple[dict[str, tuple[str, bytes]], list[str]]:
    """The plots that have something to draw: file -> title and SVG; and notes on the others."""
    drawn: dict[str, tuple[str, bytes]] = {}
    notes = []
    for plot in plots:
        try:
            content = plot.svg(outcome)
        except UserError as error:
            notes.append(f"{PLOTS}/{plot.file}: {error}")
            continue
        if content:
            drawn[plot.file] = (plot.title, content)
        else:
            notes.append(f"{PLOTS}/{plot.file} is not drawn: no cell has its values")
    return drawn, notes


def _write_plots(folder: Path, plots: Mapping[str, bytes]) -> None:
    """Write the plots, and remove those of an earlier file that are no longer there."""
    if plots:
        folder.mkdir(exist_ok=True)
    for path in folder.glob("*.svg"):
        if _OURS.fullmatch(path.name) and path.name not in plots:
            path.unlink()
    for name, content in plots.items():
        whole_file.write(folder / name, content)
