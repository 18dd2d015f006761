"""What all kinds of plots can choose, the rows that they then show, and how a row is called in a legend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Place
from dmltrain.experiment.plan import expression
from dmltrain.experiment.results.cell import MeasuredCell, ResultRow, plain
from dmltrain.experiment.results.column import ColumnNames
from dmltrain.experiment.results.derived import DERIVED
from dmltrain.experiment.results.fault import Fault, nearest
from dmltrain.experiment.results.measured import Measured, Value, measured
from dmltrain.experiment.results.outcome import Outcome
from dmltrain.experiment.results.value_text import exact
from dmltrain.report.summaries.summary import COLUMNS

Check = Callable[[object, ColumnNames, Place], Any]
MOST_PANELS = 6
LARGEST = 1e100


@dataclass(frozen=True)
class Chosen:
    """The choices of one plot, by name, as COMMON and its kind read them."""

    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


# -- reading ----------------------------------------------------------------------------------------------------------


def name(given: object, names: ColumnNames, where: Place) -> str:
    """A variable, a column of the summary, an option or a derived value."""
    return names.check(str(given), where)


def variables(given: object, names: ColumnNames, where: Place) -> tuple[str, ...]:
    """A variable, or a list of them."""
    listed = given if isinstance(given, list) else [given]
    known = sorted(plain(name) for name in names.variables)
    for name in listed:
        if plain(str(name)) not in known:
            raise Fault(where, f"there is no variable {name!r}: {nearest(plain(str(name)), known)}")
    return tuple(plain(str(name)) for name in listed)


def variable(given: object, names: ColumnNames, where: Place) -> str:
    if isinstance(given, list):
        raise Fault(where, f"expected one variable, not {given!r}")
    return variables(given, names, where)[0]


def condition(given: object, names: ColumnNames, where: Place) -> expression.Expression:
    """An expression over variables."""
    try:
        parsed = expression.parse(str(given))
    except UserError as error:
        raise Fault(where, str(error)) from None
    for name in sorted(parsed.names):
        variable(name, names, where)
    return parsed


def words(given: object, names: ColumnNames, where: Place) -> str:
    if not isinstance(given, str):
        raise Fault(where, f"expected a text, not {given!r}")
    return given


def one_of(*choices: str) -> Check:
    """The check of a choice among words."""

    def check(given: object, names: ColumnNames, where: Place) -> str:
        if given not in choices:
            raise Fault(where, f"{given!r}: {nearest(str(given), choices)}")
        return str(given)

    return check


def switch(given: object, names: ColumnNames, where: Place) -> bool:
    if not isinstance(given, bool):
        raise Fault(where, f"expected true or false, not {given!r}")
    return given


COMMON: dict[str, Check] = {
    "title": words,  # above the plot
    "where": condition,  # rows to show, an expression over variables
    "series": variables,  # rows with the same values of these are one curve, or bars of one colour
    "panels": variable,  # a variable: each of its values has a panel
}


# -- what is shown ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlotData:
    """The outcome that a plot shows."""

    outcome: Outcome

    def rows(self, chosen: Chosen) -> list[ResultRow]:
        """The rows with results that the plot chooses."""
        where = chosen.get("where")
        return [row for row in self.outcome.rows if row.done() and (where is None or _holds(where, row))]

    def values(self, cell: MeasuredCell) -> Mapping[str, Value]:
        return {**self.outcome.derived.get(cell.id, {}), **cell.names()}

    def measured(self, row: ResultRow, of: str) -> Measured:
        return measured([self.values(cell).get(of) for cell in row.done()])

    def setting(self, row: ResultRow, of: str) -> Value:
        """The value of a row on an axis: that of its first cell."""
        return next((self.values(cell).get(of) for cell in row.done()), None)


def panels(rows: Sequence[ResultRow], chosen: Chosen) -> list[tuple[str, list[ResultRow]]]:
    """(heading, rows) of each panel; one without a heading if the plot chooses no variable for them."""
    by = chosen.get("panels")
    if not by:
        return [("", list(rows))]
    groups = grouped(rows, (by,))
    return [(series_label((by,), values), group) for values, group in groups.items()][:MOST_PANELS]


def series_names(rows: Sequence[ResultRow], chosen: Chosen, axes: Iterable[str]) -> tuple[str, ...]:
    """The variables whose values make a series: those chosen, or all that vary and are not on an axis."""
    given = chosen.get("series")
    if given is not None:
        return tuple(given)
    taken = {*axes, chosen.get("panels")}
    return tuple(name for name in varying(rows) if name not in taken)


def check_apart(rows: Sequence[ResultRow], chosen: Chosen, names: Sequence[str]) -> None:
    """UserError if the choice of series puts rows with different settings in the same place."""
    names = [name for name in (*names, chosen.get("panels")) if name]
    for values, group in grouped(rows, names).items():
        if len(group) > 1 and "series" in chosen.values:
            others = ", ".join(name.replace("_", "-") for name in varying(group))
            raise UserError(
                f"{len(group)} rows would be in one place, {series_label(names, values)}: name {others} in `series` or "
                "`panels` too, or choose rows with `where`"
            )


def drawable(number: float) -> bool:
    """Whether matplotlib can draw a number: its ticks fail for larger ones."""
    return abs(number) < LARGEST


def varying(rows: Sequence[ResultRow]) -> list[str]:
    """The variables that differ between rows."""
    names = dict.fromkeys(plain(name) for row in rows for name in row.settings)
    return [name for name in names if len({repr(_setting(row, name)) for row in rows}) > 1]


def grouped(rows: Sequence[ResultRow], names: Sequence[str]) -> dict[tuple[Value, ...], list[ResultRow]]:
    groups: dict[tuple[Value, ...], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(tuple(_setting(row, name) for name in names), []).append(row)
    return groups


def series_label(names: Sequence[str], values: Sequence[Value]) -> str:
    """`kv-store dist_sync, staleness 10`."""
    return ", ".join(
        f"{name.replace('_', '-')} {exact(value) or 'none'}" for name, value in zip(names, values, strict=True)
    )


def heading(name: str) -> str:
    """How an axis is called."""
    if name in COLUMNS:
        return COLUMNS[name].heading
    return DERIVED.get(name, name.replace("_", "-"))


def _setting(row: ResultRow, name: str) -> Value:
    return {plain(key): value for key, value in row.settings.items()}.get(name)


def _holds(where: expression.Expression, row: ResultRow) -> bool:
    try:
        return bool(where.value({plain(key): value for key, value in row.settings.items()}))
    except UserError:
        return False
