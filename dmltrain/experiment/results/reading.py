"""The log folder of each cell -> a MeasuredCell. The only module of this room that reads files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.experiment.result import DONE, ERROR, Result
from dmltrain.experiment.results.cell import CellRecord, MeasuredCell
from dmltrain.experiment.results.measured import Value
from dmltrain.report import reading
from dmltrain.report.runs.facts import Facts, facts
from dmltrain.report.runs.run import Run
from dmltrain.report.summaries.summary import summary

VERSIONS = ("dmltrain", "torch", "mxnet", "python")  # in this order


def cells(folder: Path, results: Sequence[Result]) -> list[MeasuredCell]:
    """The cells of the results in `folder`. A cell that is done and has no readable log is an error."""
    return [cell(folder, result) for result in results]


def cell(folder: Path, result: Result) -> MeasuredCell:
    log = _log(folder, result)
    if result.status != DONE:
        return _cell(result, result.status, log, result.error)
    try:
        run = run_of(result.folder)
    except UserError as error:
        return _cell(result, ERROR, log, _without(str(error), result.folder))
    known = facts(run)
    values = {name: plain_value(value) for name, value in summary(run, known=known).items()}
    fault = _without(run.faults[0], result.folder) if run.faults else ""
    return replace(_cell(result, DONE, log, fault), summary=values, record=_record(known, values), run=run)


def run_of(folder: Path) -> Run:
    """The run in a cell's log folder. UserError if there is none."""
    return reading.read(os.fspath(folder))[0]


def plain_value(value: object) -> Value:
    """A value as tables show it: lists as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cell(result: Result, status: str, log: str, error: str) -> MeasuredCell:
    counts = {"workers": result.workers, "servers": result.servers}
    return MeasuredCell(
        id=result.id,
        settings={name: plain_value(value) for name, value in result.settings.items()},
        status=status,
        options={**counts, **{name: plain_value(value) for name, value in result.options.items()}},
        log=log,
        error=error,
    )


def _record(known: Facts, values: Mapping[str, Value]) -> CellRecord:
    versions = tuple(
        f"{'Python' if name == 'python' else name} {known.versions[name]}"
        for name in VERSIONS
        if known.versions.get(name)
    )
    return CellRecord(str(values.get("machine") or ""), versions, (known.started or "")[:10])


def _log(folder: Path, result: Result) -> str:
    """The log that says most of a failure, from `folder`: that of the first worker; else the cell's folder."""
    logs = sorted(path.name for path in result.folder.glob("*.log") if path.is_file())
    name = next((log for log in logs if log.startswith("worker-")), logs[0] if logs else "")
    return Path(os.path.relpath(result.folder / name, folder)).as_posix()


def _without(text: str, folder: Path) -> str:
    """An error without the path of its cell, which is not the same everywhere."""
    return text.replace(f"{folder}{os.sep}", "").replace(os.fspath(folder), "logs")
