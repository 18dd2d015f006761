"""The grid of an experiment: the values of all variables, for each cell. Pure.

The value of a variable may be an expression of other variables. So each combination evaluates a variable after those
that it needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Place
from dmltrain.experiment.plan import expression
from dmltrain.experiment.plan.definition import Axis, Experiment, Grid
from dmltrain.experiment.plan.expression import Expression, Value, as_text

MOST_COMBINATIONS = 100_000
SEED = "seed"

Settings = Mapping[str, Value]  # by name with underscores, in the order of the file; the seed comes last


def combinations(experiment: Experiment) -> int:
    """The number of combinations before `where`, computed without them."""
    grids = (math.prod(len(axis.rows) for axis in grid) for grid in experiment.grids)
    return sum(grids) * max(1, len(experiment.seeds))


def settings(experiment: Experiment) -> tuple[list[Settings], int]:
    """The settings of each cell, and how many were left out because another cell has the same.

    All cells of the first seed come first, so that the whole table is there before it is repeated. UserError for a grid
    without cells, or with too many.
    """
    total = combinations(experiment)
    if total > MOST_COMBINATIONS:
        raise experiment.error(("grid",), f"it has {total} combinations: expected at most {MOST_COMBINATIONS}")
    if experiment.seeds and any(SEED in axis.names for grid in experiment.grids for axis in grid):
        raise experiment.error(("seeds",), "the grid has a variable seed: use one of them")
    distinct: dict[tuple[tuple[str, str], ...], Settings] = {}
    count = 0
    for setting in _all(experiment):
        count += 1
        distinct.setdefault(tuple((name, as_text(value)) for name, value in setting.items()), setting)
    if not distinct:
        raise experiment.error(("where",), f"none of {total} combinations has {experiment.where}: the grid has no cell")
    return list(distinct.values()), count - len(distinct)


def _all(experiment: Experiment) -> Iterator[Settings]:
    names = frozenset(experiment.variables)
    where = _where(experiment, names)
    for seed in experiment.seeds or (None,):
        for grid in experiment.grids:
            places = {name: axis.place for axis in grid for name in axis.names}
            for raw in _raw(grid):
                values = _Values(experiment, {**raw, **({} if seed is None else {SEED: seed})}, places, names).all()
                if where is None or _true(experiment, where, values):
                    yield values


def _raw(grid: Grid) -> Iterator[dict[str, Value]]:
    """The combinations of a grid, with expressions as text."""
    for rows in itertools.product(*(axis.rows for axis in grid)):
        yield {name: value for axis, row in zip(grid, rows, strict=True) for name, value in _named(axis, row)}


def _named(axis: Axis, row: tuple[Value, ...]) -> Iterator[tuple[str, Value]]:
    return zip(axis.names, row, strict=True)


def _where(experiment: Experiment, names: frozenset[str]) -> Expression | None:
    if not experiment.where:
        return None
    try:
        condition = expression.parse(experiment.where)
    except UserError as error:
        raise experiment.error(("where",), str(error)) from None
    for name in sorted(condition.names - names):
        listed = ", ".join(experiment.variables) or "none"
        raise experiment.error(("where",), f"{name} is no variable: the variables are {listed}")
    return condition


def _true(experiment: Experiment, where: Expression, values: Settings) -> bool:
    try:
        return bool(where.value(values))
    except UserError as error:
        raise experiment.error(("where",), str(error)) from None


class _Values:
    """The values of one combination."""

    def __init__(
        self, experiment: Experiment, raw: Mapping[str, Value], places: Mapping[str, Place], names: frozenset[str]
    ):
        self.experiment, self.raw, self.places, self.names = experiment, raw, places, names
        self.known: dict[str, Value] = {}
        self.open: list[str] = []  # variables whose value is being computed

    def all(self) -> Settings:
        return {name: self.value(name) for name in self.raw}

    def value(self, name: str) -> Value:
        if name not in self.known:
            if name in self.open:
                circle = " -> ".join([*self.open[self.open.index(name) :], name])
                raise self._error(name, f"these variables need each other: {circle}")
            self.open.append(name)
            self.known[name] = self._computed(name)
            self.open.pop()
        return self.known[name]

    def _computed(self, name: str) -> Value:
        raw = self.raw[name]
        try:
            needed = needs(raw, self.names)
        except UserError as error:
            raise self._error(name, str(error)) from None
        if not needed:
            return expression.filled(raw, {}) if isinstance(raw, str) else raw
        for other in sorted(needed - set(self.raw)):
            raise self._error(name, f"{raw} needs the variable {other}, which this grid does not have")
        values = {other: self.value(other) for other in needed}
        try:
            return evaluated(raw, values, self.names)
        except UserError as error:
            raise self._error(name, str(error)) from None

    def _error(self, name: str, text: str) -> UserError:
        return self.experiment.error(self.places.get(name, ("seeds",)), text)


@lru_cache(maxsize=4096)
def needs(value: Value, names: frozenset[str]) -> frozenset[str]:
    """The variables that a value of the file needs: those of its expression, or in braces."""
    parsed = expression.found_in(value, names)
    if parsed:
        return parsed.names
    return expression.names_in(value, names) if isinstance(value, str) else frozenset()


@lru_cache(maxsize=4096)
def _expression(value: Value, names: frozenset[str]) -> Expression | None:
    return expression.found_in(value, names)


def evaluated(value: Value, variables: Mapping[str, Value], names: frozenset[str]) -> Value:
    """The value itself, that of its expression, or the text with its braces filled."""
    parsed = _expression(value, names)
    if parsed:
        return parsed.value(variables)
    return expression.filled(value, variables) if isinstance(value, str) else value
