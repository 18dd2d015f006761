"""The actions of dmltrain-parse. An action reads logs and returns what to print; it prints nothing itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from dmltrain.base.errors import UserError
from dmltrain.report import missing_metrics, plot, reading
from dmltrain.report.command_line import width
from dmltrain.report.label import labels
from dmltrain.report.runs.facts import facts
from dmltrain.report.runs.run import Run
from dmltrain.report.summaries import compare_text, summary_text
from dmltrain.report.summaries.compare import compare
from dmltrain.report.summaries.compare_text import Compared
from dmltrain.report.summaries.series import table_over
from dmltrain.report.summaries.summary import summary
from dmltrain.report.table import Table, table
from dmltrain.report.text import FORMATS, longest_line, panels


@dataclass(frozen=True)
class ActionResult:
    """text: for standard output. notes, faults: messages; with a fault the program exits with 2."""

    text: str = ""
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def epochs(given: argparse.Namespace) -> ActionResult:
    """The table of epochs of all runs, side by side where they fit."""
    runs, faults = read(given.logs)
    tables, unplaced = _tables(runs, given.aggregate, given.x)
    text, notes = _table_text(tables, given)
    if given.plot:
        faults = faults + _plotted(runs, given)
    notes += [note for run in runs for note in run.notes]
    if given.format != "json":  # JSON has all metrics, whichever were asked for
        notes += missing_metrics.notes(tables, given.metric_names)
    return ActionResult(text, notes, faults + unplaced)


def _tables(runs: Sequence[Run], aggregate: str, x: str | None) -> tuple[list[Table], list[str]]:
    """The tables, and faults for the runs whose logs do not have the axis `x`."""
    tables, faults = [], []
    for run in runs:
        try:
            tables.append(table_over(run, aggregate, x) if x else table(run, aggregate))
        except UserError as error:
            faults.append(str(error))
    return tables, faults


def _table_text(tables: Sequence[Table], given: argparse.Namespace) -> tuple[str, list[str]]:
    """The text of the tables, and notes on its layout."""
    text, limit = FORMATS[given.format](tables, given.metric_names), width(given.wide)
    if given.format != "markdown" or limit is None:
        return text, []
    several = sum(bool(table.rows) for table in tables) > 1
    if several and given.x == "time":
        return panels(tables, given.metric_names, limit), []  # runs have no times in common
    if (letters := longest_line(text)) <= limit:
        return text, []
    form = "the runs are below each other" if several else "it is in parts"
    note = f"the table has lines of {letters} letters, and {limit} fit: {form}; --wide keeps it whole"
    return panels(tables, given.metric_names, limit), [note]


def _plotted(runs: Sequence[Run], given: argparse.Namespace) -> list[str]:
    aggregate = "mean" if given.aggregate == "all" else given.aggregate
    try:
        plot.save(_tables([run for run in runs if run.epochs], aggregate, given.x)[0], given.plot)
    except UserError as error:
        return [str(error)]
    return []


def summaries(given: argparse.Namespace) -> ActionResult:
    """One row for each run, also for a run without epochs."""
    runs, faults = read(reading.folders(given.logs))
    known = [facts(run) for run in runs]
    rows = [summary(run, given.aggregate, known_facts) for run, known_facts in zip(runs, known, strict=True)]
    rows = [{**row, "run": name} for row, name in zip(rows, labels(runs), strict=True)]
    limit = width(given.wide)
    shown = summary_text.FORMATS[given.format](rows, limit)
    notes = [note for run, known_facts in zip(runs, known, strict=True) for note in (*run.notes, *known_facts.notes)]
    if shown.left_out:
        notes.insert(0, f"left out, as {limit} letters fit into a line: {', '.join(shown.left_out)}; --wide shows all")
    if given.plot:
        faults = faults + _plotted(runs, given)
    return ActionResult(shown.text, list(dict.fromkeys(notes)), faults)


def comparison(given: argparse.Namespace) -> ActionResult:
    """What differs between two runs, or two folders of runs. Exits with 0 whatever the verdict."""
    a, b = (read(reading.folders([path])) for path in given.compare)
    faults = list(dict.fromkeys([*a[1], *b[1]]))
    if not (a[0] and b[0]):
        return ActionResult(faults=faults)
    names = labels([*a[0], *b[0]])
    differences = compare(a[0], b[0], given.aggregate)
    compared = Compared(differences, tuple(names[: len(a[0])]), tuple(names[len(a[0]) :]))
    text = compare_text.FORMATS[given.format](compared, width(given.wide))
    notes = [note for run in (*a[0], *b[0]) for note in (*run.notes, *facts(run).notes)]
    return ActionResult(text, list(dict.fromkeys(notes)), faults)


def read(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs of all paths, and what was wrong with them."""
    runs: list[Run] = []
    faults: list[str] = []
    for path in paths:
        try:
            runs += reading.read(path)
        except UserError as error:
            faults.append(str(error))
    return runs, faults + [fault for run in runs for fault in run.faults]
