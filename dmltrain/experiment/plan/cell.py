"""The cells of an experiment: one run each, with its settings, its ID and the options of program and launcher. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.experiment.plan import grid
from dmltrain.experiment.plan.definition import Experiment, Options
from dmltrain.experiment.plan.expression import Value, as_text
from dmltrain.experiment.plan.grid import Settings
from dmltrain.experiment.plan.sections import LAUNCH, dashed, nearest

LONGEST_ID = 120  # characters
ONLY = "cell"  # the ID of a cell without settings, and the name of the ID in expressions
OF_LAUNCHER = tuple(name for name in LAUNCH if name != "args")


@dataclass(frozen=True)
class Cell:
    """One run. `options`: of the program, by name with dashes; None: left out, True: the flag alone."""

    id: str
    settings: Settings
    options: Mapping[str, Value]
    workers: int = 1
    servers: int | None = None  # None: the launcher's default, one for each worker
    launcher: str = ""  # "": the launcher's default
    hosts: str = ""  # hosts file, relative to the experiment's file

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of the program."""
        return tuple(word for name, value in self.options.items() for word in _words(name, value))


def _words(name: str, value: Value) -> tuple[str, ...]:
    if value is None or value is False:
        return ()
    text = as_text(value)
    if value is True:
        return (f"--{name}",)
    return (f"--{name}={text}",) if text.startswith("-") else (f"--{name}", text)


@dataclass(frozen=True)
class Cells:
    """All cells of an experiment, in the order in which they run. `merged`: how many combinations were left out because
    a cell has the same values."""

    all: tuple[Cell, ...]
    merged: int = 0


def cells(experiment: Experiment, flags: Collection[str] | None) -> Cells:
    """The cells. `flags`: the program's options, such as --lr; None: not known, and then every variable is an option.

    UserError with file and line for a variable that has no effect, an option that the program does not have, and an
    expression without a value.
    """
    known = None if flags is None else {dashed(flag) for flag in flags}
    settings, merged = grid.settings(experiment)
    _check_names(experiment, known)
    return Cells(tuple(_cell(experiment, setting, known) for setting in settings), merged)


def cell_id(settings: Settings) -> str:
    """A name for a folder: num-layers=50,devices=2,seed=0. Each combination of settings has another one."""
    parts = [(dashed(name), as_text(value)) for name, value in settings.items()]
    text = ",".join(f"{name}={value}" for name, value in parts)
    safe = re.sub(r"[^A-Za-z0-9=,._+-]", "-", text)[:LONGEST_ID]
    if safe == text and not any("," in value or "=" in value for _, value in parts):
        return safe or ONLY
    return f"{safe}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def _cell(experiment: Experiment, settings: Settings, known: Collection[str] | None) -> Cell:
    name = cell_id(settings)
    make = _Maker(experiment, settings, {**settings, ONLY: name})
    options = make.options(experiment.options, "options")
    launch = make.options(experiment.launch, "launch")
    for variable, value in settings.items():
        option = dashed(variable)
        if option in OF_LAUNCHER:
            _set(launch, option, value, make.fixed(experiment.launch, option))
        elif known is None or option in known:
            _set(options, option, value, make.fixed(experiment.options, option))
    workers = launch.get("workers")
    return Cell(
        id=name,
        settings=settings,
        options=options,
        workers=_count(experiment, "workers", 1 if workers is None else workers, 1),
        servers=None if launch.get("servers") is None else _count(experiment, "servers", launch["servers"], 0),
        launcher=as_text(launch["launcher"]) if launch.get("launcher") is not None else "",
        hosts=as_text(launch["hosts"]) if launch.get("hosts") is not None else "",
    )


def _set(values: dict[str, Value], name: str, value: Value, fixed: bool) -> None:
    """Set the option of the variable's name to its value, unless the file computes that option or leaves it out."""
    if fixed or name not in values:
        values[name] = value


class _Maker:
    """Evaluates the options of one cell."""

    def __init__(self, experiment: Experiment, settings: Settings, values: Settings):
        self.experiment, self.settings, self.values = experiment, settings, values
        self.names = frozenset([*experiment.variables, ONLY])

    def options(self, given: Options, section: str) -> dict[str, Value]:
        return {name: self._value(value, (section, name)) for name, value in given.items()}

    def fixed(self, given: Options, name: str) -> bool:
        """Whether an entry is a plain value: only the default of the variable of its name."""
        value = given.get(name)
        return value is not None and not grid.needs(value, self.names)

    def _value(self, value: Value, place: tuple[str, str]) -> Value:
        try:
            needed = grid.needs(value, self.names)
            for other in sorted(needed - set(self.values)):
                raise UserError(f"{value} needs the variable {other}, which not every grid has")
            return grid.evaluated(value, {name: self.values[name] for name in needed}, self.names)
        except UserError as error:
            raise self.experiment.error(place, str(error)) from None


def _count(experiment: Experiment, name: str, value: Value, least: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise experiment.error(("launch", name), f"{as_text(value)}: expected a number of at least {least}")
    return value


# -- names ------------------------------------------------------------------------------------------------------------


def _check_names(experiment: Experiment, known: Collection[str] | None) -> None:
    """UserError for an option that the program does not have, and for a variable without effect."""
    if known is None:
        return
    for name in experiment.options:
        if name not in known:
            raise experiment.error(
                ("options", name),
                f"{experiment.program} has no option --{name}{nearest(name, known) or '; its --help lists all'}",
            )
    used = _used(experiment)
    for grid_ in experiment.grids:
        for axis in grid_:
            for name in axis.names:
                if dashed(name) not in {*known, *OF_LAUNCHER} and name not in used:
                    raise experiment.error(
                        axis.place,
                        f"the variable {dashed(name)} has no effect: {experiment.program} has no option of that name"
                        f"{nearest(name, known)}, and no expression uses it; its --help lists all options",
                    )


def _used(experiment: Experiment) -> set[str]:
    """The variables that an expression of an option, of the launcher or of another variable uses."""
    names = frozenset([*experiment.variables, ONLY])
    values: list[Any] = [*experiment.options.values(), *experiment.launch.values()]
    values += [value for grid in experiment.grids for axis in grid for row in axis.rows for value in row]
    used: set[str] = set()
    for value in values:
        try:
            used |= grid.needs(value, names)
        except UserError:
            continue  # reported with its place when the cells are made
    return used
