"""The sections of an experiment file: read, and checked one by one. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Content, Place, plain
from dmltrain.experiment.plan.definition import Axis, Experiment, Grid
from dmltrain.experiment.plan.expression import Value, as_text

SECTIONS = (
    *("title", "description", "source", "program", "launch", "options", "grid", "where", "seeds", "time-limit"),
    *("small", "columns", "speed-up", "sentences", "plots", "published", "transpose", "extends"),
)
SMALL = ("options", "launch", "grid", "where", "seeds", "time-limit")
LAUNCH = ("workers", "servers", "launcher", "hosts", "args")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,60}")
LONGEST_SECONDS = 10**8
MOST_CHOICES = 10_000  # values of a variable
MOST_VARIABLES = 100  # of a grid
ZIP = "zip"
RESERVED = ("cell", "null", "true", "false", "zip")


def check_names(content: Content, place: Place, valid: Collection[str], what: str) -> None:
    """UserError for the first key of the mapping at `place` that is not in `valid`; - and _ are the same."""
    value = content.value
    for key in place:
        value = value[key]
    for name in value:
        if dashed(name) not in valid:
            near = nearest(name, valid)
            raise content.error((*place, name), f"unknown {what}{near}; valid: {', '.join(valid)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """', did you mean lr?' or ''."""
    near = difflib.get_close_matches(dashed(name), list(names), 1, 0.7)
    return f", did you mean {near[0]}?" if near else ""


def dashed(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")


class Sections:
    """The sections at `place`: of the file's top, or of `small`."""

    def __init__(self, content: Content, place: Place):
        self.content, self.place = content, place
        section = content.value
        for key in place:
            section = section[key]
        self.section: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # as they are written
        for name, value in section.items():
            self._once(self.names, dashed(name), name, place)
            self.section[dashed(name)] = value

    def experiment(self, path: Path, stem: str) -> Experiment:
        if not isinstance(self.section.get("program"), str):
            raise self.error(("program",), "missing: expected the path of a program, relative to this file")
        launch, arguments = self.launch()
        return Experiment(
            path=path,
            name=stem,
            program=self.text("program"),
            title=self.text("title"),
            description=self.text("description"),
            source=self.text("source"),
            launch=launch,
            arguments=arguments,
            options=self.options(),
            grids=self.grids(),
            where=self.text("where"),
            seeds=self.seeds(),
            time_limit=self.time_limit(),
            columns=tuple(self.list_of("columns")),
            plots=tuple(self.list_of("plots")),
            published=tuple(self.list_of("published")),
            transpose=self.switch("transpose"),
            content=self.content,
        )

    def error(self, place: Place, text: str) -> UserError:
        keys = (self.names.get(str(place[0]), place[0]), *place[1:]) if place else ()
        return self.content.error((*self.place, *keys), text)

    def _once(self, seen: dict[str, str], name: str, written: str, place: Place) -> None:
        if name in seen:
            raise self.content.error((*place, written), f"given twice, also as {seen[name]}: remove one")
        seen[name] = written

    def text(self, name: str) -> str:
        value = self.section.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error((name,), f"expected text, found {value!r}")
        return (value or "").strip()

    def list_of(self, name: str) -> list[Any]:
        value = self.section.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error((name,), "expected a list")
        return value or []

    def switch(self, name: str) -> bool:
        value = self.section.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error((name,), f"expected true or false, found {value!r}")
        return bool(value)

    def time_limit(self) -> float | None:
        value = self.section.get("time-limit")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_SECONDS:
            raise self.error(("time-limit",), f"expected seconds above 0, found {value!r}")
        return float(value)

    def seeds(self) -> tuple[int, ...]:
        values = plain([] if self.section.get("seeds") is None else self.section["seeds"])
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.error(("seeds", index), f"expected a number such as 0, 1, 2, found {value!r}")
            if value in values[:index]:
                raise self.error(("seeds", index), f"{value} is given twice: it would give the same result again")
        return tuple(values)

    def options(self) -> dict[str, Value]:
        return self._options("options", self._mapping(self.section.get("options"), ("options",)))

    def launch(self) -> tuple[dict[str, Value], tuple[str, ...]]:
        section = dict(self._mapping(self.section.get("launch"), ("launch",)))
        for name in section:
            if name not in LAUNCH:
                near = nearest(name, LAUNCH)
                raise self.error(("launch", name), f"unknown name{near}; valid: {', '.join(LAUNCH)}")
        words = section.pop("args", None)
        words = [] if words is None else words
        if not isinstance(words, list) or not all(isinstance(word, (str, int, float)) for word in words):
            raise self.error(("launch", "args"), "expected a list of words, such as [--wire, plain]")
        return self._options("launch", section), tuple(str(word) for word in words)

    def _options(self, section: str, values: Mapping[str, Any]) -> dict[str, Value]:
        options: dict[str, Value] = {}
        seen: dict[str, str] = {}
        for name, value in values.items():
            place = (section, name)
            if not NAME.fullmatch(name.removeprefix("--")):
                raise self.error(place, "expected the name of an option, such as num-epochs")
            self._once(seen, dashed(name), name, (*self.place, section))
            options[dashed(name)] = self._scalar(value, place)
        return options

    def _mapping(self, value: Any, place: Place) -> Mapping[str, Any]:
        if value is not None and not isinstance(value, dict):
            raise self.error(place, "expected a mapping such as {num-epochs: 12}")
        return value or {}

    def _scalar(self, value: Any, place: Place) -> Value:
        if isinstance(value, (list, dict)):
            raise self.error(place, "expected one value: text, a number, true or null; write several as text: 30,60")
        if isinstance(value, str) and ("\0" in value or "\n" in value):
            raise self.error(place, "expected text on one line")
        return value  # type: ignore[no-any-return]

    # -- the grid -----------------------------------------------------------------------------------------------------

    def grids(self) -> tuple[Grid, ...]:
        value = self.section.get("grid")
        if isinstance(value, list):
            if not value:
                raise self.error(("grid",), "the list is empty: expected a mapping for each grid")
            return tuple(self._grid(grid, ("grid", index)) for index, grid in enumerate(value))
        return (self._grid(value, ("grid",)),)

    def _grid(self, value: Any, place: Place) -> Grid:
        axes: list[Axis] = []
        for name, choices in self._mapping(value, place).items():
            at = (*place, name)
            if dashed(name) != ZIP:
                axes.append(self._axis({name: choices}, at))
                continue
            for index, zipped in enumerate(plain(choices)):
                axes.append(
                    self._axis(self._mapping(zipped, at), (*at, index) if isinstance(choices, list) else at, True)
                )
        seen: set[str] = set()
        for axis in axes:
            for name in axis.names:
                if name in seen:
                    raise self.content.error(axis.place, f"the variable {dashed(name)} is in this grid twice")
                seen.add(name)
        if len(seen) > MOST_VARIABLES:
            raise self.error(place, f"{len(seen)} variables: expected at most {MOST_VARIABLES}")
        return tuple(axes)

    def _axis(self, columns: Mapping[str, Any], place: Place, zipped: bool = False) -> Axis:
        """An axis of one variable, or of those of a `zip`."""
        if not columns:
            raise self.error(place, "expected variables with lists of equal length, such as {workers: [1, 5]}")
        lists = {}
        for name, choices in columns.items():
            at = (*place, name) if zipped else place
            if not NAME.fullmatch(name) or name in RESERVED:
                raise self.error(
                    at, f"expected the name of a variable: letters, digits and -, not {', '.join(RESERVED)}"
                )
            lists[name.replace("-", "_")] = self._choices(choices, at)
        lengths = {len(values) for values in lists.values()}
        if len(lengths) > 1:
            sizes = ", ".join(f"{name} has {len(values)}" for name, values in lists.items())
            raise self.error(place, f"zipped lists need the same length: {sizes}")
        rows = tuple(zip(*lists.values(), strict=True))
        seen: set[str] = set()
        for row in rows:
            text = ", ".join(map(as_text, row))
            if text in seen:
                raise self.error(place, f"{text} is given twice: remove one; for repeated measurements use seeds")
            seen.add(text)
        return Axis(tuple(lists), rows, (*self.place, *place))

    def _choices(self, value: Any, place: Place) -> list[Value]:
        choices = list(plain(value))
        if not choices:
            raise self.error(place, "the list is empty, so that the grid has no cell: expected at least one value")
        if len(choices) > MOST_CHOICES:
            raise self.error(place, f"{len(choices)} values: expected at most {MOST_CHOICES}")
        return [self._scalar(choice, (*place, index)) for index, choice in enumerate(choices)]
