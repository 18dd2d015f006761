"""A cell of an experiment with everything that its logs say of it. Pure: `reading` makes cells from folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dmltrain.experiment.result import DONE, STATUSES
from dmltrain.experiment.results.measured import Value
from dmltrain.report.runs.run import Run

SEED = "seed"


@dataclass(frozen=True)
class CellRecord:
    """Where and with what a cell ran, for the caption; empty where its logs do not say."""

    machine: str = ""
    versions: tuple[str, ...] = ()  # `torch 2.13.0`
    date: str = ""  # of its start: 2026-11-22


@dataclass(frozen=True)
class MeasuredCell:
    """One run of a setting.

    settings: the variables of the grid and the seed. options: those of the program. summary: the columns of
    `dmltrain.report.summaries.summary` for a cell that is done, run: its values by epoch. log: the path of its log from
    the folder of results, with slashes.
    """

    id: str
    settings: Mapping[str, Value]
    status: str
    options: Mapping[str, Value] = field(default_factory=dict)
    summary: Mapping[str, Value] = field(default_factory=dict)
    record: CellRecord = CellRecord()
    log: str = ""
    error: str = ""
    run: Run | None = field(default=None, repr=False, compare=False)

    def setting(self) -> dict[str, Value]:
        """The variables without the seed: cells that have the same are one row."""
        return {name: value for name, value in self.settings.items() if name != SEED}

    def names(self) -> dict[str, Value]:
        """What a column can name, by plain name: a variable comes before what the log says, and that before an option.
        `error`, `exit_code` and everything measured is there for a cell that is done only."""
        values = {plain(name): value for name, value in self.options.items()}
        values |= {plain(name): value for name, value in self.summary.items() if value is not None}
        return values | {plain(name): value for name, value in self.settings.items()}


@dataclass(frozen=True)
class ResultRow:
    """The cells that differ only in their seed."""

    settings: Mapping[str, Value]
    cells: tuple[MeasuredCell, ...]

    def done(self) -> tuple[MeasuredCell, ...]:
        return tuple(cell for cell in self.cells if cell.status == DONE)

    @property
    def status(self) -> str:
        """done if any cell is, and else the first of error, running, pending that a cell is."""
        statuses = {cell.status for cell in self.cells}
        return next(status for status in STATUSES if status in statuses)


def plain(name: str) -> str:
    """`-` and `_` in names are the same."""
    return name.replace("-", "_")


def rows(cells: Sequence[MeasuredCell]) -> tuple[ResultRow, ...]:
    """In the order of the first cell of each."""
    groups: dict[str, list[MeasuredCell]] = {}
    for cell in cells:
        groups.setdefault(repr(sorted(cell.setting().items())), []).append(cell)
    return tuple(ResultRow(group[0].setting(), tuple(group)) for group in groups.values())
