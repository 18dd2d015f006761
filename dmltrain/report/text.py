"""Tables -> text, one function per format.

The table is that of MXNet's tools/parse_log.py: epochs counted from 1, `%f` for metrics, `%.1f` for seconds. Several
runs are side by side, with the run's name before each heading; `panels` has one table for each run. JSON has everything
that was read: all keys, and epochs as printed.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmltrain import record
from dmltrain.report import label
from dmltrain.report.table import Cell, Table

Show = Callable[[float], str]
Grid = list[list[str]]  # headings, then lines of as many cells
NOTHING = "-"  # no value in the log


def markdown(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    return as_markdown(grid(tables, metrics))


def as_markdown(grid: Grid) -> str:
    """A table from headings and lines."""
    lines = [grid[0], ["---"] * len(grid[0]), *grid[1:]] if grid else []
    return "".join("| " + " | ".join(map(escaped, line)) + " |\n" for line in lines)


def escaped(cell: str) -> str:
    """Neither the end of a cell nor HTML."""
    return cell.replace("|", r"\|").replace("<", "&lt;")


def tabs(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    """The format `none` of MXNet's tool."""
    return "".join("\t".join(line) + "\n" for line in grid(tables, metrics))


def comma_separated(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    """The same table for programs: numbers with 12 digits, empty cells without a value."""
    text = io.StringIO()
    lines = grid(tables, metrics, _long)
    csv.writer(text, lineterminator="\n").writerows(
        ["" if cell == NOTHING else cell.strip() for cell in line] for line in lines
    )
    return text.getvalue()


def as_json(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    """[{"log", "epochs": [{"epoch", "train_accuracy", "validation_accuracy", "seconds", ...}]}] for all metrics."""
    return json.dumps([_json_run(table) for table in tables], indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Table], Sequence[str]], str]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "json": as_json,
    "none": tabs,
}


def _json_run(table: Table) -> dict[str, object]:
    run = table.run
    rows = [
        {"epoch": epoch, **_json_place(table, epoch), **{key: json_cell(cell) for key, cell in row.items()}}
        for epoch, row in table.rows.items()
    ]
    return {
        "log": run.log,
        **({"part": run.part} if run.part else {}),
        "files": list(run.files),
        "train_from_last_batch": list(run.from_last_batch),
        "epochs": rows,
    }


def _json_place(table: Table, epoch: int) -> dict[str, object]:
    """What `--x` asks for: "since_start" (s) or "iteration"."""
    names = {"seconds": "since_start", "iteration": "iteration"}
    return {names[table.axis]: json_cell(table.places.get(epoch))} if table.axis in names else {}


def json_cell(cell: Cell | str) -> object:
    """Strings "nan", "inf" and "-inf", which JSON lacks as numbers."""
    if isinstance(cell, list):
        return [json_cell(number) for number in cell]
    return cell if not isinstance(cell, float) or math.isfinite(cell) else str(cell)


# ---- the grid -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    heading: str
    key: str
    rows: dict[float, dict[str, Cell]]  # by what the first column says
    show: Show

    def texts(self, places: Sequence[float]) -> list[str]:
        """The cells at `places` of the first column."""
        none: dict[str, Cell] = {}
        return [self._text(self.rows.get(place, none).get(self.key)) for place in places]

    def _text(self, cell: Cell) -> str:
        if cell is None:
            return NOTHING
        if isinstance(cell, list):
            return " ".join(map(self.show, cell)) or NOTHING
        return self.show(cell)


def grid(tables: Sequence[Table], metrics: Sequence[str], show: Show | None = None) -> Grid:
    """Headings and lines of the table of all runs with epochs; [] if there is none. show: numbers as texts."""
    show = show or _short
    tables = [table for table in tables if table.rows]
    if not tables:
        return []
    columns = [
        column
        for table, name in zip(tables, labels(tables), strict=True)
        for column in _columns(table, metrics, f"{name} " if len(tables) > 1 else "", show)
    ]
    places = sorted({place for column in columns for place in column.rows})
    texts = [[_place(place, show) for place in places], *(column.texts(places) for column in columns)]
    return [[tables[0].axis, *(column.heading for column in columns)], *map(list, zip(*texts, strict=True))]


def _columns(table: Table, metrics: Sequence[str], prefix: str, show: Show) -> list[_Column]:
    keys = {name: record.metric(name) for name in metrics}
    facts = {
        name: key
        for name, key in keys.items()  # --metric-names speed: an epoch has one
        if key in table.keys or name in (*record.COMMUNICATION, *record.USAGE_KEYS)
    }
    split = {name: key for name, key in keys.items() if name not in facts}
    shown = [
        *((f"train-{name}", f"train_{key}") for name, key in split.items()),
        *((f"val-{name}", f"validation_{key}") for name, key in split.items()),
        *facts.items(),
    ]
    rows = table.counted()
    return [
        *(_Column(prefix + heading, key, rows, show) for heading, key in shown),
        _Column(f"{prefix}time", "seconds", rows, _tenths if show is _short else show),
    ]


def _place(place: float, show: Show) -> str:
    """An epoch, an iteration or seconds."""
    whole = float(place).is_integer()
    return f"{place:2.0f}" if whole and show is _short else _tenths(place) if show is _short else show(place)


def _short(number: float) -> str:
    """`%f`; numbers too small or too large for it have 6 significant digits."""
    return f"{number:f}" if number == 0 or 1e-4 <= abs(number) < 1e9 else f"{number:.6g}"


def _tenths(number: float) -> str:
    return f"{number:.1f}" if abs(number) < 1e9 else f"{number:.6g}"


def _long(number: float) -> str:
    return f"{number:.12g}"


# ---- names of runs --------------------------------------------------------------------------------------------------


def labels(tables: Sequence[Table]) -> list[str]:
    return label.labels([table.run for table in tables])
