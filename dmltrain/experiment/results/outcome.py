"""Everything that the outputs of an experiment show, as one value: what the formats, plots and sentences start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dmltrain.experiment.result import ERROR
from dmltrain.experiment.results.cell import MeasuredCell, ResultRow
from dmltrain.experiment.results.column import ResultColumn
from dmltrain.experiment.results.measured import Measured, Value
from dmltrain.experiment.results.published import Published


@dataclass(frozen=True)
class TableLine:
    """A row of the table with its values by the keys of the columns."""

    row: ResultRow
    values: Mapping[str, Measured]


@dataclass(frozen=True)
class Picture:
    """A plot. file: from the folder of results."""

    file: str
    title: str


@dataclass(frozen=True)
class Outcome:
    """The results of an experiment. derived: by a cell's id, the values of `derived.DERIVED`."""

    title: str
    columns: tuple[ResultColumn, ...]
    lines: tuple[TableLine, ...]
    derived: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    published: tuple[Published, ...] = ()
    caption: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    small: str = ""
    transpose: bool = False

    @property
    def rows(self) -> tuple[ResultRow, ...]:
        return tuple(line.row for line in self.lines)

    @property
    def cells(self) -> tuple[MeasuredCell, ...]:
        return tuple(cell for row in self.rows for cell in row.cells)

    @property
    def failed(self) -> tuple[MeasuredCell, ...]:
        return tuple(cell for cell in self.cells if cell.status == ERROR)
