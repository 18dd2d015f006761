"""The columns of an experiment's table: a name, or a heading with an expression.

columns:
  - devices                                  # a variable of the file,
  - last_accuracy                            # a column of `dmltrain-parse --summary`, an option, or a derived value
  - learning rate: lr * 1000                 # a heading: an expression over all of these
  - accuracy: {value: last_accuracy, percent: true, digits: 1}
  - time to 76 %: {value: time, reaches: 0.76}   # time, epoch or iteration of a validation accuracy
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Place
from dmltrain.experiment.plan import expression
from dmltrain.experiment.results.cell import MeasuredCell, ResultRow, plain
from dmltrain.experiment.results.derived import DERIVED
from dmltrain.experiment.results.fault import Fault, nearest
from dmltrain.experiment.results.measured import NOTHING, Measured, Value, is_number, measured
from dmltrain.report.runs.run import Run
from dmltrain.report.summaries import series
from dmltrain.report.summaries.series import AXES
from dmltrain.report.summaries.summary import COLUMNS

NOT_MEASURED = frozenset(  # columns of the summary that say how a run was set up
    (
        *("run", "backend", "network", "dataset", "launcher", "machines", "machine", "workers", "servers", "devices"),
        *("device", "batch", "global_batch", "kv_store", "staleness", "compression", "lr", "optimizer", "seed"),
        *("epochs", "processors"),
    )
)
OPTIONS = ("value", "percent", "digits", "reaches")  # of a column


@dataclass(frozen=True)
class ColumnNames:
    """What a file can name: its variables and the options of its program, besides the summary's columns."""

    variables: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()

    def known(self) -> list[str]:
        return [*sorted({plain(name) for name in self.variables | self.options}), *COLUMNS, *DERIVED]

    def measured(self, name: str) -> bool:
        """Whether a name stands for something measured."""
        set_up = {plain(name) for name in self.variables} | NOT_MEASURED
        return name not in set_up and (name in COLUMNS or name in DERIVED)

    def check(self, name: str, where: Place) -> str:
        """The name, with _ for -. Fault with the nearest name if there is none."""
        if plain(name) not in self.known():
            raise Fault(where, f"there is no {name!r}: {nearest(plain(name), self.known())}")
        return plain(name)


@dataclass(frozen=True)
class ResultColumn:
    """key: its name in results.json. name: what it shows if that is one name and no expression, else "". value: of the
    names of a cell. digits: decimals, None: as many as needed. reached: of a cell's run, in place of `value`."""

    key: str
    heading: str
    name: str
    value: Callable[[Mapping[str, Value]], Value]
    measured: bool
    percent: bool = False
    digits: int | None = None
    reached: Callable[[Run], float | None] | None = None

    def of(self, row: ResultRow, derived: Mapping[str, Mapping[str, Value]]) -> Measured:
        """The value of a row: of its cells that are done. Settings are also known of others."""
        cells = row.done() or (() if self.measured else row.cells)
        if not cells:
            return NOTHING
        values = [self._of_cell(cell, derived.get(cell.id, {})) for cell in cells]
        return measured(values, setting=not self.measured)

    def _of_cell(self, cell: MeasuredCell, derived: Mapping[str, Value]) -> Value:
        if self.reached:
            return self.reached(cell.run) if cell.run else None
        value = self.value({**derived, **cell.names()})
        return value * 100 if self.percent and is_number(value) else value  # type: ignore[operator]


def columns(given: object, names: ColumnNames) -> tuple[ResultColumn, ...]:
    """The columns of a file's `columns:`. Fault says what is wrong and what was expected."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise Fault(("columns",), "expected a list of names and of `heading: expression`")
    parsed = [_column(entry, names, ("columns", place)) for place, entry in enumerate(given)]
    for place, column in enumerate(parsed):
        if column.key in [other.key for other in parsed[:place]]:
            raise Fault(("columns", place), f"there are two columns {column.key!r}: give one another heading")
    return tuple(parsed)


def _column(given: object, names: ColumnNames, where: Place) -> ResultColumn:
    if isinstance(given, str):
        name = names.check(given, where)
        return _new_column(name, _heading(given, name, names), given, {}, names, where)
    if isinstance(given, Mapping) and len(given) == 1:
        heading, value = next(iter(given.items()))
        options = value if isinstance(value, Mapping) else {"value": value}
        _check_options(options, where)
        if "reaches" in options:
            return _column_of_reached(str(heading), options, where)
        return _new_column(str(heading), str(heading), options.get("value"), options, names, where)
    raise Fault(where, f"expected a name or one `heading: expression`, not {given!r}")


def _check_options(options: Mapping[object, object], where: Place) -> None:
    for name in options:
        if name not in OPTIONS:
            raise Fault(where, f"there is no {name!r} of a column: {nearest(str(name), OPTIONS)}")
    digits = options.get("digits", 0)
    if not isinstance(digits, int) or isinstance(digits, bool) or not 0 <= digits <= 12:
        raise Fault(where, f"digits is {digits!r}: expected a number of decimals from 0 to 12")
    if not isinstance(options.get("percent", False), bool):
        raise Fault(where, f"percent is {options['percent']!r}: expected true or false")


def _column_of_reached(heading: str, options: Mapping[str, object], where: Place) -> ResultColumn:
    axis, accuracy, digits = options.get("value"), options["reaches"], options.get("digits")
    if not isinstance(axis, str) or axis not in AXES:
        raise Fault(where, f"value is {axis!r}: expected {', '.join(AXES)}, where an accuracy is reached")
    if not isinstance(accuracy, float) or not 0 < accuracy < 1:
        raise Fault(where, f"reaches is {accuracy!r}: expected a validation accuracy between 0 and 1")
    reached = partial(series.reached, accuracy=accuracy, x=axis)
    whole = digits if isinstance(digits, int) else None
    return ResultColumn(heading, heading, "", lambda _: None, measured=True, digits=whole, reached=reached)


def _new_column(
    key: str, heading: str, value: object, options: Mapping[str, object], names: ColumnNames, where: Place
) -> ResultColumn:
    if not isinstance(value, str):
        raise Fault(where, f"expected a name or an expression, not {value!r}")
    computed, used = _computed(value, names, where)
    percent = bool(options.get("percent", False))
    digits = options.get("digits")
    return ResultColumn(
        key=key,
        heading=f"{heading} (%)" if percent and "%" not in heading else heading,
        name=plain(value) if plain(value) in names.known() else "",
        value=computed,
        measured=any(map(names.measured, used)),
        percent=percent,
        digits=digits if isinstance(digits, int) else None,
    )


def _heading(given: str, name: str, names: ColumnNames) -> str:
    """A variable is called as in the file, a column of the summary as there."""
    if names.measured(name) and name in COLUMNS:
        return COLUMNS[name].heading
    return DERIVED.get(name, given.replace("_", " "))


def _computed(
    text: str, names: ColumnNames, where: Place
) -> tuple[Callable[[Mapping[str, Value]], Value], tuple[str, ...]]:
    """The function of an expression or name, and the names in it."""
    if plain(text) in names.known():
        name = plain(text)
        return lambda values: values.get(name), (name,)
    try:
        parsed = expression.parse(text)
    except UserError as error:
        raise Fault(where, str(error)) from None
    for name in sorted(parsed.names):
        names.check(name, where)
    return lambda values: evaluated(parsed, values), tuple(sorted(parsed.names))


def evaluated(parsed: expression.Expression, values: Mapping[str, Value]) -> Value:
    """Its value: None if it has none, as 1 / 0 or with an unknown value in it; nan with nan or an infinity in it."""
    used = [values.get(name) for name in parsed.names]
    if any(value is None for value in used):
        return None
    if any(isinstance(value, float) and not math.isfinite(value) for value in used):
        return math.nan
    try:
        return parsed.value(values)
    except UserError:
        return None
