"""Rows of the summary -> text, one function per format.

In Markdown the columns that say nothing are left out, settings that all runs have in common stand above the table, and
the least important columns are left out where the table would be wider than `width`. The other formats have all
columns.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dmltrain.report.summaries.spreadsheet import quoted
from dmltrain.report.summaries.summary import COLUMNS, SETTINGS, Value
from dmltrain.report.text import escaped, json_cell

Row = Mapping[str, Value]
_HARD = "\N{NO-BREAK SPACE}"  # where no line ends
_LONGEST_CELL = 60  # letters; --wide shows all


@dataclass(frozen=True)
class FittedTable:
    """left_out: headings of the columns that do not fit."""

    text: str
    left_out: tuple[str, ...] = ()


def markdown(rows: Sequence[Row], width: int | None = None) -> FittedTable:
    """width: letters of a line; None: no limit."""
    filled = [name for name in COLUMNS if name == "run" or any(row[name] is not None for row in rows)]
    shared = len(rows) > 1 or width is not None  # the row of one run alone has all of it where nothing must fit
    same = [name for name in filled if name in SETTINGS and shared and len({row[name] for row in rows}) == 1]
    columns = {name: _cells(rows, name, width) for name in filled if name not in same}
    kept = _fitting(columns, width)
    lines = zip(*(_padded(columns[name]) for name in kept), strict=True)
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    left_out = tuple(COLUMNS[name].heading for name in columns if name not in kept)
    return FittedTable(_caption(rows, same, width) + table if rows else "", left_out)


def _cells(rows: Sequence[Row], name: str, width: int | None) -> list[str]:
    """Heading, rule and cells of a column."""
    column = COLUMNS[name]
    texts = [column.show(row[name]) for row in rows]
    if width is not None and name != "run":
        texts = [text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 3] + "..." for text in texts]
    return [column.heading, "---", *map(escaped, texts)]


def _padded(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell * (width // 3) + "-" * (width % 3) if cell == "---" else cell.ljust(width) for cell in cells]


def _fitting(columns: Mapping[str, Sequence[str]], width: int | None) -> list[str]:
    """The names of the most important columns that fit, in the order of the table."""
    kept, used = set(), len("|")
    for name in sorted(columns, key=lambda name: COLUMNS[name].importance):
        needed = max(map(len, columns[name])) + len(" | ")
        if width is None or used + needed <= width or name == "run":
            kept.add(name)
            used += needed
    return [name for name in columns if name in kept]


def _caption(rows: Sequence[Row], same: Sequence[str], width: int | None) -> str:
    """Lines of whole settings."""
    if not same:
        return ""
    settings = (f"{COLUMNS[name].heading} {COLUMNS[name].show(rows[0][name])}" for name in same)
    text = "; ".join(setting.replace(" ", _HARD) for setting in settings)
    text = escaped(f"The same in all runs: {text}" if len(rows) > 1 else f"Settings: {text}")
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) if width else [text]
    return "\n".join(lines).replace(_HARD, " ") + "\n\n"


def comma_separated(rows: Sequence[Row], width: int | None = None) -> FittedTable:
    """A heading for each column, by its name; numbers with 12 digits, empty cells without a value."""
    text = io.StringIO()
    lines = ([plain(row[name]) for name in COLUMNS] for row in rows)
    csv.writer(text, lineterminator="\n").writerows([list(COLUMNS), *lines])
    return FittedTable(text.getvalue())


def plain(value: Value) -> str:
    """For programs: numbers with 12 digits."""
    return "" if value is None else f"{value:.12g}" if isinstance(value, float) else quoted(str(value))


def as_json(rows: Sequence[Row], width: int | None = None) -> FittedTable:
    """[{"run", "backend", ...}], null where the log does not say it."""
    values = [{name: json_cell(row[name]) for name in COLUMNS} for row in rows]
    return FittedTable(json.dumps(values, indent=1, allow_nan=False) + "\n")


def tabs(rows: Sequence[Row], width: int | None = None) -> FittedTable:
    """The columns that say something, separated by tabs."""
    filled = [name for name in COLUMNS if name == "run" or any(row[name] is not None for row in rows)]
    lines = [[COLUMNS[name].heading for name in filled]]
    lines += [[COLUMNS[name].show(row[name]) for name in filled] for row in rows]
    return FittedTable("".join("\t".join(line) + "\n" for line in lines))


FORMATS: dict[str, Callable[[Sequence[Row], int | None], FittedTable]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "json": as_json,
    "none": tabs,
}
