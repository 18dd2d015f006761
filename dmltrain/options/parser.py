"""The command line of the training programs, from the table of options."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dmltrain.base.errors import UserError
from dmltrain.options import from_recipe, refused
from dmltrain.options.checks import checked
from dmltrain.options.field import flag
from dmltrain.options.table import Options


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default after each help text, except where the default is None or ()."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, ()) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def parser(prog: str, description: str = "", defaults: Mapping[str, Any] | None = None) -> Parser:
    arguments = Parser(prog=prog, description=description, formatter_class=_Help)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = arguments.add_argument_group(group)
        groups[group].add_argument(flag(field.name), default=field.default, **field.metadata["arguments"])
    arguments.set_defaults(**(defaults or {}))
    return arguments


def parse(
    argv: Sequence[str], prog: str = "train", description: str = "", defaults: Mapping[str, Any] | None = None
) -> Options:
    """Parse the arguments after the program's name; `defaults` are the program's own. Raises UserError."""
    defaults = dict(defaults or {})
    words = _with_batch_size([dashed(word) for word in argv])
    for word in words:
        refused.check(word)
    arguments = parser(prog, description, {name: value for name, value in defaults.items() if name != "num_layers"})
    recipe = from_recipe.values(arguments.parse_known_args(words)[0].recipe, arguments)
    defaults = from_recipe.above(defaults, recipe)
    depth = defaults.pop("num_layers", None)
    arguments.set_defaults(**defaults)
    values, unknown = arguments.parse_known_args(words)
    if unknown:
        raise UserError(refused.unknown(unknown[0]))
    if values.num_layers is None and values.network == defaults.get("network"):
        values.num_layers = depth  # this default belongs to the network of the program, or of the recipe
    if values.num_classes is not None and not gives(words, "top_k"):
        values.top_k = usual_top_k(values.top_k, values.num_classes)
    try:
        return checked(Options(**vars(values)))
    except UserError as error:
        given = [name for name in recipe if not gives(words, name)]
        raise from_recipe.explained(error, values.recipe, given) from None


def _with_batch_size(words: list[str]) -> list[str]:
    """`--batch 64` means `--batch-size 64`, as it did when there was no --batch."""
    replaced = []
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        is_size = name == "--batch" and (value if equals else after).isdecimal()
        replaced.append(f"--batch-size{equals}{value}" if is_size else word)
    return replaced


def dashed(word: str) -> str:
    """'--add_stn' -> '--add-stn': MXNet's programs spell some options so."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def gives(argv: Sequence[str], name: str) -> bool:
    """Whether the arguments have the option of this field, written out."""
    return any(dashed(word).partition("=")[0] == flag(name) for word in argv)


def usual_top_k(top_k: int, num_classes: int) -> int:
    """A program's default of --top-k; 0, which is off, where every class is among so many."""
    return top_k if top_k < num_classes else 0
