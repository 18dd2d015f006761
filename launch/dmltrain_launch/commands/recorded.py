"""What a record says about reaching its job: hosts, options and the launcher, each checked as what a user gives.

The values of hosts go through the table of hosts files, those of options through the table of the command line. A
wrong field, type or character is a LaunchError that names the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmltrain.base import schema
from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import LAUNCHERS, AllOptions, listing
from dmltrain_launch.command_line.table import RECORDED
from dmltrain_launch.job import hosts
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.attribute import convert, host_name
from dmltrain_launch.job.hosts.entry import errors_at
from dmltrain_launch.job.job import MARK
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Option

ATTRIBUTES = {"address": "addr"}  # of hosts files, for fields that have another name
MOST_PID = 1 << 30  # above every kernel's


def _is_plain(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in text)


if TYPE_CHECKING:
    _Text = str
    _Mark = str
    _Pid = int
    _Ticks = int
    _Port = int
    _ReachedBy = Any
else:
    _Text = schema.text().only(_is_plain, "text without control characters, valid UTF-8")
    _Mark = schema.text().only(MARK.fullmatch, "the mark of a job, which has letters, digits, . _ and -")
    _Pid, _Ticks, _Port = schema.whole(0, MOST_PID), schema.whole(0, 1 << 62), schema.whole(0, 65535)


@dataclass(frozen=True)
class Launcher:
    """The process of the launcher: `start` in ticks since the boot `boot_id`; 0 and "" in records of 0.4."""

    MAY_OMIT = MAY_HAVE_MORE = True

    host: _Text
    pid: _Pid = 0
    start: _Ticks = 0
    boot_id: _Text = ""


@dataclass(frozen=True)
class Recorded:
    """The checked record of a job. `options` are those by which its hosts are reached."""

    job: str
    mark: str
    ended: bool
    launcher: Launcher
    control: str  # the name of its control socket; "": it has none
    cluster: str  # the value of --launcher
    hosts: tuple[Host, ...]
    options: Options


# -- as the file has it: unknown fields of later versions are ignored --------------------------------------------------


@dataclass(frozen=True)
class _Host:
    MAY_OMIT = True

    name: _Text
    address: _Text = ""
    interface: _Text = ""
    hostname: _Text = ""
    user: _Text = ""
    port: _Port = 0
    python: _Text = ""


def _of_option(option: Option, default: object) -> Any:
    """The annotation of a recorded option."""
    assert option.record
    wrong = option.record.wrong
    if isinstance(default, tuple):
        return "tuple[_Text, ...]"
    if isinstance(default, int):
        return schema.whole(0, option.record.most)

    def right(value: str) -> str:
        if value and (expected := wrong(value)):
            raise schema.unexpected(value, expected)
        return value

    return schema.type_of(_Text).then(right)


_DEFAULTS = {name: getattr(AllOptions(), name) for name in RECORDED}
if not TYPE_CHECKING:
    _ReachedBy = dataclasses.make_dataclass(
        "_ReachedBy",
        [(name, _of_option(RECORDED[name], each), each) for name, each in _DEFAULTS.items()],
        namespace={"MAY_OMIT": True, "__module__": __name__},
        frozen=True,
    )


@dataclass(frozen=True)
class _File:
    MAY_OMIT = MAY_HAVE_MORE = True

    job: _Text
    mark: _Mark
    launcher: _Text
    launched_from: Launcher
    reached_by: _ReachedBy
    hosts: tuple[_Host, ...]
    ended: str | None = None
    control: _Text = ""


def recorded(record: Mapping[str, Any], path: Path, given: Options) -> Recorded:
    """The record in the file `path`. An option that is `given` on the command line takes the place of the record's."""
    taken, reached_by = _given(given), record.get("reached_by")
    if isinstance(reached_by, dict):
        record = {**record, "reached_by": {name: each for name, each in reached_by.items() if name not in taken}}
    try:
        file = schema.read(_File, record)
    except schema.Invalid as error:
        raise LaunchError(f"{path} is not the record of a job: {error}") from None
    if file.launcher not in LAUNCHERS:
        raise LaunchError(f"{path}: unknown launcher {file.launcher!r}: expected {listing()}")
    return Recorded(
        job=file.job,
        mark=file.mark,
        ended=bool(file.ended),
        launcher=file.launched_from,
        control=file.control,
        cluster=file.launcher,
        hosts=_hosts(file, path),
        options=_options(file.reached_by, f"{path}: reached_by", given),
    )


def _hosts(file: _File, path: Path) -> tuple[Host, ...]:
    made = [_host(each, f"{path}: hosts[{number}]") for number, each in enumerate(file.hosts)]
    return tuple(hosts.checked(made, str(path)))


def _host(found: _Host, where: str) -> Host:
    with errors_at(where):
        others = {name: str(value) for name, value in vars(found).items() if value and name != "name"}
        values = {name: convert(ATTRIBUTES.get(name, name), text) for name, text in others.items()}
        return Host(name=host_name(found.name), **values, where=where)


def _given(options: Options) -> set[str]:
    """The recorded options that the command line has."""
    return {name for name, default in _DEFAULTS.items() if getattr(options, name) != default}


def _options(reached_by: Any, where: str, given: Options) -> Options:
    """`given`, completed by the recorded options that it leaves at their defaults."""
    options = AllOptions()
    for name, option in RECORDED.items():
        if (value := getattr(reached_by, name)) != _DEFAULTS[name]:
            for text in value if isinstance(value, tuple) else [str(value)]:
                options = option.apply(options, text, f"{where}: {name}", {})
    return replace(given, **{name: getattr(options, name) for name in _given(options)})
