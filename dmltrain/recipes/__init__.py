"""Published training recipes as options of the training programs: `--recipe NAME`. One YAML file, one recipe.

    source, accuracy, hardware, time: what was published, as texts
    differs: a list of what the published recipe has otherwise, or what dmltrain lacks for it
    options: the options by name, without the dashes; a list for an option of several words

A file of a user's own needs `options` only. This package knows no options: `dmltrain.options` checks them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Content, bytes_of, plain, read

LIST = "list"  # the name that prints all recipes instead
SUFFIXES = (".yaml", ".yml")
FOLDER = Path(__file__).parent
TEXTS = ("source", "accuracy", "hardware", "time")
KEYS = (*TEXTS, "differs", "options")


@dataclass(frozen=True)
class Recipe:
    """`words`: what stands after each option on a command line, by the option's name without dashes."""

    content: Content
    words: Mapping[str, tuple[str, ...]]

    def text(self, key: str) -> str:
        return str(self.content.value.get(key, "not given"))

    @property
    def differs(self) -> tuple[str, ...]:
        return tuple(map(str, plain(self.content.value.get("differs", []))))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Recipe:
    """The recipe of that name, or in the file of that name. UserError if there is none, or it is not a recipe."""
    if name.endswith(SUFFIXES):
        return parse(bytes_of(name, "a recipe, such as those of --recipe list"), name)
    if name not in names():
        raise UserError(
            f"--recipe {name}: unknown recipe; valid: {', '.join([LIST, *names()])}, or a file whose name ends in .yaml"
        )
    path = FOLDER / f"{name}.yaml"
    return parse(path.read_bytes(), str(path))


def parse(data: bytes, name: str) -> Recipe:
    """The recipe in the content of the file `name`. UserError with file and line."""
    content = read(data, name)
    if not isinstance(content.value, dict) or not isinstance(content.value.get("options"), dict):
        raise content.error((), "expected a recipe, with a section `options` such as `options: {lr: 0.1}`")
    for key in content.value:
        if key not in KEYS:
            raise content.error((key,), f"unknown section; valid: {', '.join(KEYS)}")
    options = content.value["options"]
    return Recipe(content, {name: _words(content, name, value) for name, value in options.items()})


def _words(content: Content, name: str, value: Any) -> tuple[str, ...]:
    values = plain(value)
    if not values or any(each is None or isinstance(each, (list, dict)) for each in values):
        raise content.error(("options", name), "expected a number, a text, true, false, or a list of these")
    return tuple(str(int(each)) if isinstance(each, bool) else str(each) for each in values)


def listing() -> str:
    """All recipes, for `--recipe list`."""
    return "\n\n".join(_described(name) for name in names())


def _described(name: str) -> str:
    recipe = find(name)
    rows = [(key, recipe.text(key)) for key in TEXTS] + [("differs", text) for text in recipe.differs]
    options = " ".join(f"--{option} {' '.join(words)}" for option, words in recipe.words.items())
    return "\n".join([name, *(_row(key, text) for key, text in [*rows, ("options", options)])])


def _row(key: str, text: str) -> str:
    return textwrap.fill(text, 110, initial_indent=f"  {key:<9} ", subsequent_indent=" " * 12, break_on_hyphens=False)
