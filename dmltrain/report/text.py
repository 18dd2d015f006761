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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dmltrain.logs import record
from dmltrain.report import label
from dmltrain.report.table import Cell, Shifted, Table

Show = Callable[[float], str]
Grid = list[list[str]]  # headings, then lines of as many cells
NOTHING = "-"  # no value in the log
_AT_ONCE = 4096  # lines


def markdown(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    return as_markdown(lines(tables, metrics))


def as_markdown(grid: Iterable[Sequence[str]]) -> str:
    """A Markdown table from headings and lines."""
    return joined("| " + " | ".join(map(escaped, line)) + " |\n" for line in _with_rule(grid))


def _with_rule(grid: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    for number, line in enumerate(grid):
        yield line
        if not number:
            yield ["---"] * len(line)


def joined(pieces: Iterable[str]) -> str:
    """The text of many lines; a list of them takes several times the memory."""
    pieces, parts = iter(pieces), list[str]()
    while part := "".join(islice(pieces, _AT_ONCE)):
        parts.append(part)
    return "".join(parts)


def escaped(cell: str) -> str:
    """The text for a Markdown cell: it neither ends the cell nor is HTML."""
    return cell.replace("|", r"\|").replace("<", "&lt;")


def tabs(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    """The format `none` of MXNet's tool."""
    return joined("\t".join(line) + "\n" for line in lines(tables, metrics))


def comma_separated(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    """The same table for programs: numbers with 12 digits, empty cells without a value."""
    return joined(
        _csv_line(["" if cell == NOTHING else cell.strip() for cell in line]) for line in lines(tables, metrics, _long)
    )


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def as_json(tables: Sequence[Table], metrics: Sequence[str]) -> str:
    """[{"log", "epochs": [{"epoch", "train_accuracy", "validation_accuracy", "seconds", ...}]}] for all metrics."""
    return joined(_json_pieces(tables))


def _json_pieces(tables: Sequence[Table]) -> Iterator[str]:
    """What json.dumps(..., indent=1) writes, without all rows in memory."""
    yield "["
    for number, table in enumerate(tables):
        yield ",\n " if number else "\n "
        head, between = _dumped(_json_run(table), 1).removesuffix("[]\n }"), "["
        yield head
        for epoch in table.rows:
            yield f"{between}\n   {_dumped(_json_row(table, epoch), 3)}"
            between = ","
        yield "\n  ]\n }" if table.rows else "[]\n }"
    yield "\n]\n" if tables else "]\n"


def _dumped(value: object, indent: int) -> str:
    return json.dumps(value, indent=1, allow_nan=False).replace("\n", "\n" + " " * indent)


FORMATS: dict[str, Callable[[Sequence[Table], Sequence[str]], str]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "json": as_json,
    "none": tabs,
}


def _json_run(table: Table) -> dict[str, object]:
    """Without its rows."""
    run = table.run
    return {
        "log": run.log,
        **({"part": run.part} if run.part else {}),
        "files": list(run.files),
        "train_from_last_batch": list(run.from_last_batch),
        "epochs": [],
    }


def _json_row(table: Table, epoch: int) -> dict[str, object]:
    cells = {key: json_cell(cell) for key, cell in table.rows[epoch].items()}
    return {"epoch": epoch, **_json_place(table, epoch), **cells}


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
    show: Show

    def text(self, cell: Cell) -> str:
        if cell is None:
            return NOTHING
        if isinstance(cell, list):
            return " ".join(map(self.show, cell)) or NOTHING
        return self.show(cell)


def grid(tables: Sequence[Table], metrics: Sequence[str], show: Show | None = None) -> Grid:
    """Headings and lines of the table of all runs with epochs; [] if there is none. show: number -> text."""
    return list(lines(tables, metrics, show))


def lines(tables: Sequence[Table], metrics: Sequence[str], show: Show | None = None) -> Iterator[list[str]]:
    """The same, one by one."""
    show = show or _short
    tables = [table for table in tables if table.rows]
    if not tables:
        return
    columns = [
        _columns(table, metrics, f"{name} " if len(tables) > 1 else "", show)
        for table, name in zip(tables, labels(tables), strict=True)
    ]
    yield [tables[0].axis, *(column.heading for columns_of_run in columns for column in columns_of_run)]
    counted = [table.counted() for table in tables]
    keys = [[column.key for column in columns_of_run] for columns_of_run in columns]
    parts = list(zip(tables, counted, keys, columns, strict=True))
    for place in _places(counted):
        yield [_place(place, show), *(text for part in parts for text in _texts(*part, place))]


def _places(counted: Sequence[Mapping[float, int]]) -> Iterable[float]:
    """What the first column says, ascending."""
    if len(counted) == 1 and isinstance(counted[0], Shifted):
        return counted[0]
    return sorted({place for epochs in counted for place in epochs})


def _texts(
    table: Table, epochs: Mapping[float, int], keys: Sequence[str], columns: Sequence[_Column], place: float
) -> list[str]:
    """The cells of a table at a place of the first column."""
    epoch = epochs.get(place)
    if epoch is None:
        return [NOTHING] * len(columns)
    return [column.text(cell) for column, cell in zip(columns, table.cells(epoch, keys), strict=True)]


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
    return [
        *(_Column(prefix + heading, key, show) for heading, key in shown),
        _Column(f"{prefix}time", "seconds", _tenths if show is _short else show),
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


# ---- tables that are too wide ----------------------------------------------------------------------------------------


def panels(tables: Sequence[Table], metrics: Sequence[str], width: int) -> str:
    """One Markdown table, or several below each other, for each run with epochs, with the run's name above it. Lines
    have at most `width` letters, if single columns do."""
    tables = [table for table in tables if table.rows]
    names = [f"{escaped(name)}:\n\n" if len(tables) > 1 else "" for name in labels(tables)]
    return "\n".join(
        name + as_markdown(part)
        for name, table in zip(names, tables, strict=True)
        for part in _narrow_parts(grid([table], metrics), width)
    )


def longest_line(text: str) -> int:
    """The letters of the longest line."""
    longest = start = 0
    while (end := text.find("\n", start)) >= 0:  # a list of lines takes several times the memory
        longest, start = max(longest, end - start), end + 1
    return max(longest, len(text) - start)


def _narrow_parts(whole: Grid, width: int) -> Iterator[Grid]:
    """The columns of a table, as many at a time as fit; each part begins with the first column."""
    part: list[int] = [0]
    for column in range(1, len(whole[0]) if whole else 0):
        if len(part) > 1 and longest_line(as_markdown(_with_columns(whole, [*part, column]))) > width:
            yield _with_columns(whole, part)
            part = [0]
        part.append(column)
    if whole:
        yield _with_columns(whole, part)


def _with_columns(whole: Grid, numbers: Sequence[int]) -> Grid:
    return [[line[number] for number in numbers] for line in whole]
