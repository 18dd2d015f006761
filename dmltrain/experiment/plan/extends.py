"""A file may extend another one: it gets from there all that it does not say itself. Pure.

A section replaces that of the other file. But of `options` and `launch` each entry replaces one entry. The section
`small` is not inherited, because it makes the other file's experiment smaller.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dmltrain.base.read_yaml import Content, Place
from dmltrain.experiment.plan.sections import dashed

SECTION = "extends"
MERGED = ("options", "launch")  # by entry


def extended(own: Content, base: Content, folder: str) -> Content:
    """`own`, with what only `base` says added. `folder`: the folder of `base`, relative to that of `own`."""
    written_as, marks = {dashed(name): name for name in own.value}, dict(own.marks)
    value = dict(own.value)
    for name, section in _seen_from(folder, base.value).items():
        if dashed(name) in (SECTION, "small"):
            continue
        written = written_as.get(dashed(name))
        if written is None:
            value[name] = section
            marks.update(_below(base, (name,), (name,)))
        elif dashed(name) in MERGED and isinstance(section, Mapping) and isinstance(value[written], Mapping):
            entries = _missing(section, value[written])
            value[written] = {**entries, **value[written]}
            for entry in entries:
                marks.update(_below(base, (name, entry), (written, entry)))
    return Content(own.name, value, marks)


def _missing(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    own_names = {dashed(name) for name in own}
    return {name: value for name, value in base.items() if dashed(name) not in own_names}


def _below(base: Content, place: Place, new: Place) -> dict[Place, str]:
    """The marks of the value at `place` and of all values in it, moved to the place `new`."""
    return {(*new, *at[len(place) :]): mark for at, mark in base.marks.items() if at[: len(place)] == place}


def _seen_from(folder: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The sections `value` of a file in `folder`, with `folder` before their relative paths."""
    moved = dict(value)
    if isinstance(moved.get("program"), str):
        moved["program"] = _join(folder, moved["program"])
    launch = moved.get("launch")
    if isinstance(launch, Mapping) and isinstance(launch.get("hosts"), str):
        moved["launch"] = {**launch, "hosts": _join(folder, launch["hosts"])}
    return moved


def _join(folder: str, path: str) -> str:
    return path if path.startswith("~") else os.path.normpath(os.path.join(folder, path))
