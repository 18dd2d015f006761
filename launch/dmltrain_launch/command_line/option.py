"""A row of the launcher's options, and functions that make one: how a value becomes a field of `Options`. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.job import OWNED, Setting
from dmltrain_launch.job.options import Options

Apply = Callable[[Options, str, str, Mapping[str, str]], Options]


@dataclass(frozen=True)
class Option:
    """One row of the table. `apply(options, value, name, environ)` returns the options with this one added."""

    names: tuple[str, ...]
    value: str  # the placeholder in --help; "" if the option takes no value
    meaning: str
    apply: Apply


def changed(options: Options, field: str, value: object) -> Options:
    """A copy of `options` with one field replaced."""
    changes: dict[str, Any] = {field: value}
    return replace(options, **changes)


def number(field: str, convert: Callable[[str], float], least: float, most: float = math.inf) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        try:
            converted = convert(value)
        except ValueError:
            converted = math.nan
        if not (least <= converted < math.inf) or converted > most:
            kind = "a whole number" if convert is int else "a number of seconds"
            limit = f"to {most}" if most < math.inf else "or more"
            raise LaunchError(f"{name} is {value}: expected {kind}, {least} {limit}")
        return changed(options, field, converted)

    return apply


def constant(field: str, fixed: object) -> Apply:
    return lambda options, value, name, environ: changed(options, field, fixed)


def text(field: str, what: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if not value:
            raise LaunchError(f"{name} is empty: expected {what}")
        return changed(options, field, value)

    return apply


def append(field: str) -> Apply:
    return lambda options, value, name, environ: changed(options, field, (*getattr(options, field), value))


def extend(field: str, what: str) -> Apply:
    """For a comma-separated list. A repeated option adds to the list."""
    set_text = text(field, what)

    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        before = getattr(options, field)
        return set_text(options, f"{before},{value}" if before and value else value, name, environ)

    return apply


def checked(field: str, check: Callable[[str], object]) -> Apply:
    """For a text that `check` accepts, which raises LaunchError."""

    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        try:
            check(value)
        except LaunchError as error:
            raise LaunchError(f"{name} {error}") from None
        return changed(options, field, value)

    return apply


def url(field: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if not re.fullmatch(r"https?://[^/\s?#]+/?", value):
            raise LaunchError(f"{name} is {value}: expected http://HOST:PORT or https://HOST:PORT")
        return changed(options, field, value)

    return apply


def choice(field: str, choices: Collection[str]) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        if value not in choices:
            raise LaunchError(f"{name} {value}: expected one of {', '.join(choices)}")
        return changed(options, field, value)

    return apply


def mode(mode: str) -> Apply:
    return lambda options, value, name, environ: replace(options, mode=mode, target=value)


def setting(role: str) -> Apply:
    def apply(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:[=:](.*))?", value, re.DOTALL | re.ASCII)
        if not match:
            word = re.split("[=:]", value, maxsplit=1)[0]  # the rest may be secret
            raise LaunchError(f"{name} {word}: expected NAME=VALUE, NAME:VALUE, or NAME for the launcher's own value")
        variable, text = match.groups()
        if text is None and variable not in environ:
            raise LaunchError(f"{name} {variable}: not set in the launcher's environment; use {variable}=VALUE")
        return _with_setting(options, name, Setting(variable, environ[variable] if text is None else text, role))

    return apply


def secret(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in environ:
        variable = value.partition("=")[0]
        raise LaunchError(f"{name} {variable}: expected the name of a variable in the launcher's environment")
    return _with_setting(options, name, Setting(value, environ[value], secret=True))


def _with_setting(options: Options, name: str, setting: Setting) -> Options:
    if setting.name in OWNED:
        raise LaunchError(f"{name} {setting.name}: the launcher sets this variable for every process")
    return replace(options, settings=(*options.settings, setting))
