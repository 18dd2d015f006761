"""The table of epochs in parts that fit a width: one for each run, and several where a run has many columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dmltrain.report.table import Table
from dmltrain.report.text import Grid, as_markdown, escaped, grid, labels


def panels(tables: Sequence[Table], metrics: Sequence[str], width: int) -> str:
    """One Markdown table for each run with epochs, with the run's name above it; no line is longer than `width`, unless
    a single column is."""
    tables = [table for table in tables if table.rows]
    names = [f"{escaped(name)}:\n\n" if len(tables) > 1 else "" for name in labels(tables)]
    return "\n".join(
        name + as_markdown(part)
        for name, table in zip(names, tables, strict=True)
        for part in _parts(grid([table], metrics), width)
    )


def longest(text: str) -> int:
    """The letters of the longest line."""
    longest = start = 0
    while (end := text.find("\n", start)) >= 0:  # a list of lines takes several times the memory
        longest, start = max(longest, end - start), end + 1
    return max(longest, len(text) - start)


def _parts(whole: Grid, width: int) -> Iterator[Grid]:
    """The columns of a table, as many at a time as fit; each part begins with the first column."""
    part: list[int] = [0]
    for column in range(1, len(whole[0]) if whole else 0):
        if len(part) > 1 and longest(as_markdown(_columns(whole, [*part, column]))) > width:
            yield _columns(whole, part)
            part = [0]
        part.append(column)
    if whole:
        yield _columns(whole, part)


def _columns(whole: Grid, numbers: Sequence[int]) -> Grid:
    return [[line[number] for number in numbers] for line in whole]
