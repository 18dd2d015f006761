"""A comparison -> text, one function per format. In Markdown the cells of long settings are shortened to the width."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmltrain.report.label import printable
from dmltrain.report.summaries.compare import NOTHING, ColumnDifference, Comparison
from dmltrain.report.summaries.summary import Value
from dmltrain.report.summaries.summary_text import plain
from dmltrain.report.text import escaped, json_cell

_LEAST = 12  # letters of a shortened cell


@dataclass(frozen=True)
class Compared:
    """A comparison, and the names of both sides' runs."""

    comparison: Comparison
    a: tuple[str, ...]
    b: tuple[str, ...]


def markdown(compared: Compared, width: int | None = None) -> str:
    comparison = compared.comparison
    parts = [_folded(f"A: {_named(compared.a)}", width) + "\n" + _folded(f"B: {_named(compared.b)}", width)]
    settings = [(setting.name, setting.a, setting.b) for setting in comparison.settings]
    if settings:
        parts.append(_table(("what differs", "A", "B"), settings, width))
    parts.append(_folded(_rest(comparison), width))
    results = [
        (result.column.heading, _shown(result, result.a), _shown(result, result.b), result.change)
        for result in comparison.results
    ]
    if results:
        parts.append(_table(("result", "A", "B", "B - A"), results, width))
    return "\n\n".join([*parts, *(_folded(verdict.text, width) for verdict in comparison.verdicts)]) + "\n"


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"


def _rest(result: Comparison) -> str:
    """What the table of settings leaves out."""
    equal = f"{result.same} {'other settings' if result.settings else 'settings, all that the logs say,'} are the same."
    sentences = [equal if result.same or result.settings else "The logs do not say any setting."]
    sentences += [
        f"Options of {name} only: {', '.join(names)}." for name, names in zip("AB", result.only, strict=True) if names
    ]
    return " ".join(sentences)


def _folded(text: str, width: int | None) -> str:
    text = escaped(printable(text))
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False) if width else text


def _shown(result: ColumnDifference, value: Value) -> str:
    return result.column.show(value)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Columns of equal width; cells are shortened where lines would be too long."""
    texts = [[escaped(printable(cell)) for cell in row] for row in rows]
    columns = [list(column) for column in zip(headings, *texts, strict=True)]
    if width is not None:
        most = max(_LEAST, (width - max(map(len, columns[0])) - 4 - 3 * (len(columns) - 1)) // (len(columns) - 1))
        columns[1:] = [[_short(cell, most) for cell in column] for column in columns[1:]]
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width for width in widths]
    first, *others = zip(*columns, strict=True)
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in (first, rule, *others)]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def _short(cell: str, most: int) -> str:
    return cell if len(cell) <= most else cell[: most - 3] + "..."


def _lines(compared: Compared, show: Callable[[ColumnDifference, Value], str]) -> list[list[str]]:
    comparison = compared.comparison
    lines = [["part", "name", "A", "B", "B - A"]]
    lines += [["runs", "", "; ".join(compared.a), "; ".join(compared.b), ""]]
    lines += [["setting", setting.name, setting.a, setting.b, ""] for setting in comparison.settings]
    lines += [["only A", name, "", NOTHING, ""] for name in comparison.only[0]]
    lines += [["only B", name, NOTHING, "", ""] for name in comparison.only[1]]
    lines += [
        ["result", result.name, show(result, result.a), show(result, result.b), result.change]
        for result in comparison.results
    ]
    return lines + [["verdict", verdict.about, verdict.result, verdict.text, ""] for verdict in comparison.verdicts]


def comma_separated(compared: Compared, width: int | None = None) -> str:
    """Lines of part, name, A, B and B - A; a verdict has its result and sentence in A and B."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_lines(compared, lambda _, value: plain(value)))
    return text.getvalue()


def tabs(compared: Compared, width: int | None = None) -> str:
    lines = _lines(compared, _shown)
    return "".join("\t".join(printable(cell) for cell in line) + "\n" for line in lines)


def as_json(compared: Compared, width: int | None = None) -> str:
    """{"a", "b": names, "settings", "same", "only", "results", "verdicts"}."""
    comparison = compared.comparison
    value = {
        "a": compared.a,
        "b": compared.b,
        "settings": [{"name": setting.name, "a": setting.a, "b": setting.b} for setting in comparison.settings],
        "same": comparison.same,
        "only": {"a": comparison.only[0], "b": comparison.only[1]},
        "results": [
            {"name": result.name, "a": json_cell(result.a), "b": json_cell(result.b)} for result in comparison.results
        ],
        "verdicts": [
            {"about": verdict.about, "result": verdict.result, "text": verdict.text} for verdict in comparison.verdicts
        ],
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Compared, int | None], str]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "json": as_json,
    "none": tabs,
}
