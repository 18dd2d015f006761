"""The options of --recipe, between a program's defaults and its command line."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.options import refused
from dmltrain.options.field import flag
from dmltrain.options.table import Options

FIELDS = {field.name: field.metadata["arguments"] for field in dataclasses.fields(Options)}


def values(name: str | None, arguments: argparse.ArgumentParser) -> dict[str, Any]:
    """The options of the recipe by field name, as the program's own parser reads them; {} without a recipe.

    UserError with the file, its line and the option. For `list` prints all recipes, and ends the program.
    """
    if not name:
        return {}
    from dmltrain import recipes  # reads YAML, which takes a moment to import

    if name == recipes.LIST:
        print(recipes.listing(), flush=True)
        arguments.exit()
    recipe = recipes.find(name)
    found: dict[str, Any] = {}
    for option, words in recipe.words.items():
        field = option.replace("-", "_")
        try:
            found[field] = _value(field, words, arguments)
        except UserError as error:
            raise recipe.content.error(("options", option), str(error)) from None
    return found


def _value(name: str, words: Sequence[str], arguments: argparse.ArgumentParser) -> Any:
    refused.check(flag(name))
    if name == "recipe":
        raise UserError("a recipe cannot start from another one: copy its options")
    if name not in FIELDS:
        raise UserError(refused.unknown(flag(name)))
    if len(words) > 1 and FIELDS[name].get("nargs") != "+":
        raise UserError(f"expected one value, not a list of {len(words)}")
    given = [f"{flag(name)}={words[0]}"] if len(words) == 1 else [flag(name), *words]
    return getattr(arguments.parse_args(given), name)


def above(defaults: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Both; the recipe takes precedence. A program's default of --num-layers belongs to its own network."""
    left_out = "num_layers" if "network" in recipe else ""
    return {**{name: value for name, value in defaults.items() if name != left_out}, **recipe}


def explained(error: UserError, recipe: str, names: Sequence[str]) -> UserError:
    """The same error; of the options in it, it names those that the recipe has given: `names`, of fields."""
    named = re.findall(r"--[a-z0-9-]+", str(error))
    flags = [each for each in map(flag, names) if each in named]
    if not flags:
        return error
    return UserError(f"{error} (--recipe {recipe} gives {', '.join(flags)}; the command line takes precedence)")
