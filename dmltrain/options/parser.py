"""The command line of the training programs, from the table of options."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dmltrain.base.errors import UserError
from dmltrain.options.checks import checked
from dmltrain.options.field import flag
from dmltrain.options.refused import REFUSED
from dmltrain.options.table import FLAGS, Options


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
    depth = defaults.pop("num_layers", None)
    words = _with_batch_size([dashed(word) for word in argv])
    for word in words:
        _check_refused(word)
    values, unknown = parser(prog, description, defaults).parse_known_args(words)
    if unknown:
        raise UserError(_unknown(unknown[0]))
    if values.num_layers is None and values.network == defaults.get("network"):
        values.num_layers = depth  # this default belongs to the program's own network
    if values.num_classes is not None and not gives(words, "top_k"):
        values.top_k = usual_top_k(values.top_k, values.num_classes)
    return checked(Options(**vars(values)))


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


def _check_refused(word: str) -> None:
    name = word.split("=")[0]
    row = REFUSED.get(name)
    if row:
        raise UserError(f"{name}: {row.reason}; {row.instead}")


def _unknown(word: str) -> str:
    name = word.split("=")[0]
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.7)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown option {name}{hint}; valid options: {' '.join(FLAGS)}"
