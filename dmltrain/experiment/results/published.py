"""Results that others have published, to stand beside one's own: never in the same cell, and with their errors marked.
Figures are in the unit that the table shows, percent in a column with `percent: true`; `units` converts others.

    published:
      - title: Keras with MXNet
        source: https://example.org/report       # where the figures are
        note: one p3.16xlarge                    # optional
        place: rows                              # of this table, the default; or `table`: one of its own
        units: {last_accuracy: value / 100}      # an expression over `value`, the printed number
        errors:
          - where: {column: seconds_per_epoch, devices: 8}    # the column, and values that its row has
            printed: 304.02                                   # must be what the rows below say
            correct: 30.40                                    # a number, or an expression over `value`; or left out
            why: the total of 12 epochs is 364.8 s
        rows:
          - {devices: 1, seconds_per_epoch: 121.3, last_accuracy: 73.2}
          - {devices: 8, seconds_per_epoch: 304.02, last_accuracy: "70.10"}    # in quotes a last zero stays
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Place
from dmltrain.experiment.plan import expression
from dmltrain.experiment.results.cell import plain
from dmltrain.experiment.results.column import ColumnNames, ResultColumn, evaluated
from dmltrain.experiment.results.fault import Fault, nearest
from dmltrain.experiment.results.measured import Value, is_number

KEYS = ("title", "source", "note", "place", "units", "errors", "rows")
ERROR_KEYS = ("where", "printed", "correct", "why")
PLACES = ("rows", "table")
FEW_DIGITS = 3  # of a computed figure


@dataclass(frozen=True)
class Figure:
    """One published value. shown: as printed, or as corrected. printed: as its authors printed it, before a correction
    and in their unit. why: what is wrong with it. instead_of: what was printed, if it is corrected."""

    value: Value
    shown: str
    printed: Value
    why: str = ""
    instead_of: str = ""

    @property
    def error(self) -> str:
        """`printed 304.02: the reason`; "" if nothing is wrong."""
        return f"printed {self.instead_of}: {self.why}" if self.instead_of else self.why


@dataclass(frozen=True)
class PublishedRow:
    """figures: by the key of a column, or the plain name of a variable."""

    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class Published:
    title: str
    source: str
    note: str
    place: str
    rows: tuple[PublishedRow, ...]


def published(given: object, columns: Sequence[ResultColumn], names: ColumnNames) -> tuple[Published, ...]:
    """The results of a file's `published:`. Fault says what is wrong and what was expected."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise Fault(("published",), "expected a list of results, each with title, source and rows")
    known = {plain(name): plain(name) for name in names.variables}
    known |= {column.name: column.key for column in columns if column.name}
    known |= {plain(word): column.key for column in columns for word in (column.heading, column.key)}
    return tuple(_one(entry, known, ("published", place)) for place, entry in enumerate(given))


def _one(given: object, known: Mapping[str, str], where: Place) -> Published:
    entry = _mapping(given, KEYS, where)
    for key in ("title", "source"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise Fault(where, f"{key} is missing: expected a text")
    place = entry.get("place", "rows")
    if place not in PLACES:
        raise Fault(where, f"place is {place!r}: expected one of {', '.join(PLACES)}")
    rows = [_row(row, known, (*where, "rows", number)) for number, row in enumerate(_list(entry, "rows", where))]
    if not rows:
        raise Fault(where, "rows is missing: expected a list with the published figures")
    for number, error in enumerate(_list(entry, "errors", where)):
        rows = _marked(rows, error, known, (*where, "errors", number))
    rows = _converted(rows, entry.get("units", {}), known, (*where, "units"))
    return Published(str(entry["title"]), str(entry["source"]), str(entry.get("note") or ""), place, tuple(rows))


def _row(given: object, known: Mapping[str, str], where: Place) -> PublishedRow:
    if not isinstance(given, Mapping) or not given:
        raise Fault(where, f"expected values by column, not {given!r}")
    return PublishedRow({_key(name, known, where): _figure(value, where) for name, value in given.items()})


def _figure(given: object, where: Place) -> Figure:
    """Text that is a number counts as one, and keeps its zeros."""
    if isinstance(given, str):
        value = _as_number(given)
        return Figure(value, given, value)
    if given is None or isinstance(given, (bool, int, float)):
        return Figure(given, _text(given), given)
    raise Fault(where, f"{given!r} is no value: expected a number or a text")


def _as_number(text: str) -> Value:
    try:
        return float(text) if text.strip()[:1].isdigit() or text.strip()[:2].lstrip("+-.").isdigit() else text
    except ValueError:
        return text


def _text(value: Value) -> str:
    return "-" if value is None else expression.as_text(value)


# -- errors and units -------------------------------------------------------------------------------------------------


def _marked(rows: list[PublishedRow], given: object, known: Mapping[str, str], where: Place) -> list[PublishedRow]:
    """The rows with one error corrected where it is."""
    error = _mapping(given, ERROR_KEYS, where)
    if not isinstance(error.get("why"), str) or not error["why"]:
        raise Fault(where, "why is missing: expected the reason in words")
    place = error.get("where")
    if not isinstance(place, Mapping) or "column" not in place:
        raise Fault(where, f"where is {place!r}: expected {{column: NAME}}, and values of its row")
    key = _key(place["column"], known, where)
    wanted = {
        _key(name, known, where): _figure(value, where).value for name, value in place.items() if name != "column"
    }
    if not any(_hit(row, key, wanted) for row in rows):
        raise Fault(where, f"no row has a value of {place['column']} and {dict(place)!r}")
    return [_corrected(row, key, error, where) if _hit(row, key, wanted) else row for row in rows]


def _hit(row: PublishedRow, key: str, wanted: Mapping[str, Value]) -> bool:
    has = {name: figure.value for name, figure in row.figures.items()}
    return key in has and all(has.get(name) == value for name, value in wanted.items())


def _corrected(row: PublishedRow, key: str, error: Mapping[str, object], where: Place) -> PublishedRow:
    old = row.figures[key]
    printed, correct = error.get("printed"), error.get("correct")
    if printed is not None and _figure(printed, where).value != old.printed:
        raise Fault(where, f"printed is {printed!r}, but the row has {old.shown}: expected the same")
    if correct is None:
        new = replace(old, why=str(error["why"]))
    else:
        new = _computed(old, correct, where) if _is_expression(correct) else _figure(correct, where)
        new = replace(new, printed=old.printed, why=str(error["why"]), instead_of=old.shown)
    return PublishedRow({**row.figures, key: new})


def _is_expression(given: object) -> bool:
    return isinstance(given, str) and not is_number(_as_number(given))


def _converted(rows: list[PublishedRow], given: object, known: Mapping[str, str], where: Place) -> list[PublishedRow]:
    """The rows in this table's units."""
    if not isinstance(given, Mapping):
        raise Fault(where, "expected expressions over `value` by column, such as {last_accuracy: value / 100}")
    units = {_key(name, known, where): formula for name, formula in given.items()}
    return [
        PublishedRow(
            {
                key: _in_unit(figure, units[key], (*where, key)) if key in units else figure
                for key, figure in row.figures.items()
            }
        )
        for row in rows
    ]


def _in_unit(figure: Figure, formula: object, where: Place) -> Figure:
    return _computed(figure, formula, where) if is_number(figure.value) else figure


def _computed(figure: Figure, formula: object, where: Place) -> Figure:
    """The figure with the formula's value, shown with as many digits as were printed, or three."""
    value = _result(formula, figure.value, where)
    if not is_number(value):
        return replace(figure, value=value, shown=_text(value))
    digits = len(re.sub(r"[eE].*$|[^0-9]", "", figure.shown.lstrip("+-0.")))
    shown = f"{value:#.{digits}g}".rstrip(".") if digits >= FEW_DIGITS else f"{value:.{FEW_DIGITS}g}"
    return replace(figure, value=value, shown=_text(float(shown)) if "e" in shown else shown)


def _result(formula: object, value: Value, where: Place) -> Value:
    if not isinstance(formula, str):
        raise Fault(where, f"{formula!r} is no expression over `value`, such as value / 100")
    try:
        parsed = expression.parse(formula)
    except UserError as error:
        raise Fault(where, str(error)) from None
    if parsed.names != {"value"}:
        raise Fault(where, f"{formula} must name `value`, the printed number, and nothing else")
    return evaluated(parsed, {"value": value})


# -- forms ------------------------------------------------------------------------------------------------------------


def _key(name: object, known: Mapping[str, str], where: Place) -> str:
    if plain(str(name)) not in known:
        raise Fault(where, f"there is no column {name!r}: {nearest(plain(str(name)), known)}")
    return known[plain(str(name))]


def _mapping(given: object, keys: Sequence[str], where: Place) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        raise Fault(where, f"expected {', '.join(keys)}, not {given!r}")
    for key in given:
        if key not in keys:
            raise Fault(where, f"there is no {key!r}: {nearest(str(key), keys)}")
    return given


def _list(given: Mapping[str, object], key: str, where: Place) -> Sequence[object]:
    value = given.get(key) or []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Fault(where, f"{key} is {value!r}: expected a list")
    return value
