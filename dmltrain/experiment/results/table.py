"""An outcome -> its tables as text: headings, entries, marks and footnotes, not yet in a format.

One's own rows and published ones are different rows, so that they never share an entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dmltrain.experiment.result import DONE, ERROR
from dmltrain.experiment.results import value_text
from dmltrain.experiment.results.cell import SEED, MeasuredCell, plain
from dmltrain.experiment.results.column import ResultColumn
from dmltrain.experiment.results.measured import Value
from dmltrain.experiment.results.outcome import Outcome, TableLine
from dmltrain.experiment.results.published import Published, PublishedRow
from dmltrain.experiment.results.value_text import exact

OWN = "this experiment"
SOURCE = "source"  # the heading of the column that tells one's own rows from published ones


@dataclass(frozen=True)
class TableEntry:
    """What stands in one place of a table. link: a path from the folder of results, or a URL. mark: of a footnote."""

    text: str
    link: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Note:
    """A footnote: `a` and its text."""

    mark: str
    text: str
    link: str = ""


@dataclass(frozen=True)
class Table:
    headings: tuple[TableEntry, ...]
    lines: tuple[tuple[TableEntry, ...], ...]
    title: str = ""  # of a table with published results only
    link: str = ""

    def transposed(self) -> Table:
        """Runs in columns: the first column has the headings."""
        first, *lines = zip(self.headings, *self.lines, strict=True)
        return Table(tuple(first), tuple(map(tuple, lines)), self.title, self.link)


@dataclass(frozen=True)
class Tables:
    """The table of an experiment, published results that have tables of their own, and the footnotes of all."""

    main: Table
    beside: tuple[Table, ...]
    notes: tuple[Note, ...]


def tables(outcome: Outcome) -> Tables:
    """The text of all tables of `outcome`."""
    notes = _Notes()
    among = [published for published in outcome.published if published.place == "rows"]
    alone = [published for published in outcome.published if published.place == "table"]
    main = _main(outcome, among, notes)
    beside = [_published_table(published, outcome, notes) for published in alone]
    if outcome.transpose:
        main, beside = main.transposed(), [published.transposed() for published in beside]
    return Tables(main, tuple(beside), notes.all())


class _Notes:
    """Footnotes in the order of their first mark; equal ones share a mark."""

    def __init__(self) -> None:
        self._printed: dict[tuple[str, str, str], dict[str, None]] = {}  # what the marked figures were printed as

    def mark(self, text: str, link: str = "", of: str = "", printed: str = "") -> str:
        """The mark of a footnote. `printed`: figures of the column `of` with the same reason share it."""
        key = (text, link, of if printed else "")
        self._printed.setdefault(key, {}).update({printed: None} if printed else {})
        return _letters(list(self._printed).index(key))

    def all(self) -> tuple[Note, ...]:
        notes = []
        for number, ((text, link, _), printed) in enumerate(self._printed.items()):
            before = f"printed {', '.join(printed)}: " if printed else ""
            notes.append(Note(_letters(number), before + text, link))
        return tuple(notes)


def _letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def _main(outcome: Outcome, among: Sequence[Published], notes: _Notes) -> Table:
    places = [_decimals(column, outcome.lines) for column in outcome.columns]
    own = [_line(line, outcome.columns, places, notes) for line in outcome.lines]
    headings = [TableEntry(SOURCE)] if among else []
    lines = [((TableEntry(OWN), *entries) if among else entries) for entries in own]
    for place, entries in reversed(_placed(outcome, among, notes)):
        lines.insert(place, entries)
    return Table((*headings, *(TableEntry(column.heading) for column in outcome.columns)), tuple(lines))


def _decimals(column: ResultColumn, lines: Iterable[TableLine]) -> int:
    if column.digits is not None:
        return column.digits
    return value_text.decimals([line.values[column.key].mean for line in lines])


def _line(
    line: TableLine, columns: Sequence[ResultColumn], places: Sequence[int], notes: _Notes
) -> tuple[TableEntry, ...]:
    """The entries of one's own row. Without a value, its state stands in the first measured column, or in the last."""
    entries = [_entry(line, column, place) for column, place in zip(columns, places, strict=True)]
    failed = [cell for cell in line.row.cells if cell.status == ERROR or cell.error]
    mark = ",".join(notes.mark(text, link) for text, link in _failures(failed))
    first = next((number for number, column in enumerate(columns) if column.measured), len(columns) - 1)
    if line.row.status != DONE:
        link = failed[0].log if failed else ""
        text = line.row.status if columns[first].measured else f"{entries[first].text} ({line.row.status})"
        entries[first] = TableEntry(text, link, mark)
    elif mark:
        entries[first] = TableEntry(entries[first].text, mark=mark)
    return tuple(entries)


def _entry(line: TableLine, column: ResultColumn, places: int) -> TableEntry:
    value = line.values[column.key]
    if not column.measured and column.digits is None:
        return TableEntry(value_text.exact(value.mean) or value_text.NOTHING)
    return TableEntry(value_text.text(value, places, len(line.row.cells) if column.measured else value.count))


def _failures(cells: Sequence[MeasuredCell]) -> Iterator[tuple[str, str]]:
    """Each reason with its seeds, `seed 1: the reason`, and the log of the first; the settings are in the row."""
    reasons = dict.fromkeys(cell.error or "failed" for cell in cells)
    for reason in reasons:
        same = [cell for cell in cells if (cell.error or "failed") == reason]
        seeds = ", ".join(exact(cell.settings[SEED]) for cell in same if SEED in cell.settings)
        yield f"seed {seeds}: {reason}" if seeds else reason, same[0].log


# -- published results ------------------------------------------------------------------------------------------------


def _placed(outcome: Outcome, among: Sequence[Published], notes: _Notes) -> list[tuple[int, tuple[TableEntry, ...]]]:
    """(how many of one's own rows stand before it, entries) of each published row, ascending."""
    rows = []
    for published in among:
        for row in published.rows:
            entries = (TableEntry(published.title, published.source), *_figures(row, outcome.columns, notes))
            rows.append((_place(row, outcome), entries))
    return sorted(rows, key=lambda placed: placed[0])


def _place(row: PublishedRow, outcome: Outcome) -> int:
    """After the last row of one's own that has the same settings, as far as both say them; else at the end."""
    matching = [number for number, line in enumerate(outcome.lines, 1) if _same(row, line, outcome.columns)]
    return matching[-1] if matching else len(outcome.lines)


def _same(row: PublishedRow, line: TableLine, columns: Sequence[ResultColumn]) -> bool:
    own = {plain(name): value for name, value in line.row.settings.items()}
    own |= {column.key: line.values[column.key].mean for column in columns if not column.measured}
    shared = own.keys() & row.figures.keys()
    return bool(shared) and all(_alike(own[name], row.figures[name].value) for name in shared)


def _alike(own: Value, other: Value) -> bool:
    return own == other or str(own).lower() == str(other).lower()


def _figures(row: PublishedRow, columns: Sequence[ResultColumn], notes: _Notes) -> list[TableEntry]:
    entries = []
    for column in columns:
        figure = row.figures.get(column.key)
        if figure is None:
            entries.append(TableEntry(value_text.NOTHING))
        else:
            mark = notes.mark(figure.why, of=column.key, printed=figure.instead_of) if figure.why else ""
            entries.append(TableEntry(figure.shown, mark=mark))
    return entries


def _published_table(published: Published, outcome: Outcome, notes: _Notes) -> Table:
    """The columns of the table that have a published value."""
    has = {name for row in published.rows for name in row.figures}
    columns = [column for column in outcome.columns if column.key in has]
    lines = tuple(tuple(_figures(row, columns, notes)) for row in published.rows)
    return Table(tuple(TableEntry(column.heading) for column in columns), lines, published.title, published.source)
