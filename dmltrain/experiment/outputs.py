"""Tables, plots and the page of an experiment, made from what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dmltrain.experiment import results as tables_and_plots
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.result import Result
from dmltrain.report.page import cli as page_program


def check(experiment: Experiment) -> None:
    """UserError for a mistake in columns, plots or published rows."""
    tables_and_plots.check(experiment)


def tables(folder: Path, experiment: Experiment, results: Sequence[Result]) -> Sequence[str]:
    """Write tables and plots. Returns notes."""
    return tables_and_plots.write(folder, experiment, results)


def page(folder: Path) -> None:
    """Write report.html, and say on standard output where it is."""
    page_program.main([str(folder), "-o", str(folder / "report.html")])
