"""What an experiment file says, as one frozen value. Pure.

Expressions stay as text until `grid` and `cell` evaluate them for each cell. Columns, plots and published rows stay
plain values for `results`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Content, Place
from dmltrain.experiment.plan.expression import Value

Options = Mapping[str, Value]  # by name with dashes; text may be an expression


@dataclass(frozen=True)
class Axis:
    """One factor of a grid: variables whose values change together. `names` have underscores; `rows` are their values,
    one tuple for each place. `place`: where it stands in the file."""

    names: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    place: Place = ()


Grid = tuple[Axis, ...]  # all combinations of its axes, the last one changing fastest


@dataclass(frozen=True)
class Experiment:
    """What the file says. `small`: what --small changed, `changed`: what --set changed; texts for people, or "".

    path: as given. launch: of workers, servers, launcher, hosts; arguments: the further words for the launcher.
    overridden: the options that --set gave. grids: the cells are the union of them.
    columns, plots, published: plain values as in the file.
    """

    path: Path
    name: str
    program: str  # relative to the file's folder
    title: str = ""
    description: str = ""
    source: str = ""
    launch: Options = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    grids: tuple[Grid, ...] = ((),)
    where: str = ""
    seeds: tuple[int, ...] = ()
    time_limit: float | None = None  # s, of one cell
    small: str = ""
    changed: str = ""
    overridden: tuple[str, ...] = ()
    columns: tuple[Any, ...] = ()
    plots: tuple[Any, ...] = ()
    published: tuple[Any, ...] = ()
    transpose: bool = False
    content: Content = field(default_factory=lambda: Content("", {}, {}), repr=False, compare=False)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of all variables, in the order of the file; with `seed` if there are seeds."""
        names = [name for grid in self.grids for axis in grid for name in axis.names]
        return tuple(dict.fromkeys([*names, *(["seed"] if self.seeds else [])]))

    @property
    def resolved(self) -> dict[str, Any]:
        """All that decides the cells and their commands, as plain values for experiment.json; not the time limit."""
        return {
            "program": self.program,
            "launch": dict(self.launch),
            "arguments": list(self.arguments),
            "options": dict(self.options),
            "grids": [[{"names": axis.names, "rows": axis.rows} for axis in grid] for grid in self.grids],
            "where": self.where,
            "seeds": list(self.seeds),
        }

    @property
    def digest(self) -> str:
        """Of `resolved`: two files with the same digest have the same cells."""
        text = json.dumps(self.resolved, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def error(self, place: Place, text: str) -> UserError:
        if place[:1] in (("options",), ("launch",)) and place[1:] and place[1] in self.overridden:
            return UserError(f"--set {place[1]}: {text}")
        return self.content.error(place, text)
