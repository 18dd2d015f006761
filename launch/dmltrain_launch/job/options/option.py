"""How a field of `Options` describes an option of the command line, and from the text of its value to the value. Pure.

A field has one option (`option`), which is called as the field: `num_servers` is --num-servers; or several (`rows`). A
wrong text is a LaunchError with what was expected.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmltrain_launch import LaunchError

Apply = Callable[[Any, str, str, Mapping[str, str]], Any]
Read = Callable[[str, str], object]  # (text, name of the option): the value


@dataclass(frozen=True)
class Record:
    """How job.json has an option. `write`: from all options to what is recorded (None: the option's value). `wrong`:
    what was expected instead of a recorded text, "" if it is right. `most`: of a number."""

    write: Callable[[Any], object] | None = None
    wrong: Callable[[str], str] = lambda text: ""
    most: int = 0


@dataclass(frozen=True)
class Option:
    """An option. `apply(options, value, name, environ)` returns the options with this one added.

    `value`: the placeholder in --help; "" if the option takes no value. `after`: the option that it follows in --help.
    `reaches`: `dmltrain job` takes it, to reach the hosts of a job; `record`: and finds it in job.json. `here`: it says
    what the command does that submits a job, or names a file of its machine, so a launcher in the cluster does not get
    it. `file`: commands in other folders need this file.
    """

    names: tuple[str, ...]
    value: str
    meaning: str
    apply: Apply
    field: str = ""
    after: str = ""
    reaches: bool = False
    record: Record | None = None
    here: bool = False
    file: bool = False


def option(
    value: str,
    meaning: str,
    read: Read = lambda text, name: text,
    default: Any = "",
    name: str = "",
    short: str = "",
    also: str = "",
    joined: bool = False,
    **facts: Any,
) -> Any:
    """A field of the value that `read` makes of the text. `name` replaces the field's, `short` and `also` are further
    ones. An option that is given again adds to a tuple, or if `joined` to a comma-separated list, and else replaces the
    value. `facts`: fields of `Option`."""

    def made(field: str) -> tuple[Option, ...]:
        def apply(options: Any, text: str, given: str, environ: Mapping[str, str]) -> Any:
            before = getattr(options, field)
            new = read(f"{before},{text}" if joined and before and text else text, given)
            return changed(options, field, (*before, new) if isinstance(default, tuple) else new)

        names = tuple(filter(None, (short, name or "--" + field.replace("_", "-"), also)))
        return (Option(names, value, meaning, apply, field, **facts),)

    return dataclasses.field(default=default, metadata={"options": made})


def switch(meaning: str, default: bool = False, **facts: Any) -> Any:
    """A field that an option without a value makes the opposite of its default."""
    return option("", meaning, lambda text, name: not default, default, **facts)


def rows(default: Any, *options: Option) -> Any:
    """A field that these options change."""
    return dataclasses.field(default=default, metadata={"options": lambda field: options})


def options_of(kind: type) -> Iterator[Option]:
    """The options of a dataclass's fields, in their order."""
    for field in dataclasses.fields(kind):
        yield from field.metadata["options"](field.name) if "options" in field.metadata else ()


def changed(options: Any, field: str, value: object) -> Any:
    """A copy of `options` with one field replaced."""
    return replace(options, **{field: value})


def absolute(path: str) -> str:
    """An absolute path, because a later command may run in another folder; "" stays."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


# -- values ------------------------------------------------------------------------------------------------------------

FILE = "a file"


def number(convert: Callable[[str], float], least: float, most: float = math.inf) -> Read:
    def read(value: str, name: str) -> float:
        try:
            converted = convert(value)
        except ValueError:
            converted = math.nan
        if not (least <= converted < math.inf) or converted > most:
            kind = "a whole number" if convert is int else "a number of seconds"
            limit = f"to {most}" if most < math.inf else "or more"
            raise LaunchError(f"{name} is {value}: expected {kind}, {least} {limit}")
        return converted

    return read


def text(what: str) -> Read:
    def read(value: str, name: str) -> str:
        if not value:
            raise LaunchError(f"{name} is empty: expected {what}")
        return value

    return read


def parsed(parse: Callable[[str], object]) -> Read:
    """What `parse` makes of the text; it raises LaunchError."""

    def read(value: str, name: str) -> object:
        try:
            return parse(value)
        except LaunchError as error:
            raise LaunchError(f"{name} {error}") from None

    return read


def url(value: str, name: str) -> str:
    if not re.fullmatch(r"https?://[^/\s?#]+/?", value):
        raise LaunchError(f"{name} is {value}: expected http://HOST:PORT or https://HOST:PORT")
    return value


def choice(choices: Collection[str]) -> Read:
    def read(value: str, name: str) -> str:
        if value not in choices:
            raise LaunchError(f"{name} {value}: expected one of {', '.join(choices)}")
        return value

    return read
