"""What a record says about reaching its job: hosts, options and the launcher, each checked as what a user gives.

The values of hosts go through the table of hosts files, those of options through the table of the command line. Any
other field, type or character is a LaunchError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from dmltrain_launch.run.record import HOST_FACTS

ATTRIBUTES = {"address": "addr"}  # of hosts files, for fields that have another name
MOST_PID = 1 << 30  # above every kernel's


@dataclass(frozen=True)
class Launcher:
    """The process of the launcher: `start` in ticks since the boot `boot_id`; 0 and "" in records of 0.4."""

    host: str
    pid: int = 0
    start: int = 0
    boot_id: str = ""


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


def recorded(record: Mapping[str, Any], path: Path, given: Options) -> Recorded:
    """The record in the file `path`. An option that is `given` on the command line takes the place of the record's."""
    fields = _Fields(record, str(path))
    cluster = fields.text("launcher")
    if cluster not in LAUNCHERS:
        raise LaunchError(f"{path}: unknown launcher {cluster!r}: expected {listing()}")
    mark = fields.text("mark")
    if not MARK.fullmatch(mark):
        raise fields.wrong("mark", "the mark of a job, which has letters, digits, . _ and -", mark)
    return Recorded(
        job=fields.text("job"),
        mark=mark,
        ended=bool(fields.value("ended", (str, type(None)), None)),
        launcher=_launcher(fields.below("launched_from")),
        control=fields.text("control", ""),
        cluster=cluster,
        hosts=_hosts(fields),
        options=_options(fields.below("reached_by"), given),
    )


class _Fields:
    """The fields of a JSON object; `where` names it in errors."""

    def __init__(self, found: Mapping[str, Any], where: str):
        self.found, self.where = found, where

    def wrong(self, name: str, expected: str, value: object) -> LaunchError:
        return LaunchError(f"{self.where}: {name} is {ascii(value)[:200]}: expected {expected}")

    def value(self, name: str, kinds: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self.found.get(name, default)
        if value is ...:
            raise LaunchError(f"{self.where} is not the record of a job: it has no {name}")
        if isinstance(value, bool) or not isinstance(value, kinds):
            names = [each.__name__ for each in (kinds if isinstance(kinds, tuple) else (kinds,))]
            raise self.wrong(name, f"a value of type {' or '.join(names)}", value)
        return value

    def text(self, name: str, default: Any = ...) -> str:
        return self.checked(name, self.value(name, str, default))

    def checked(self, name: str, value: object) -> str:
        if not isinstance(value, str) or any(ord(each) < 32 or 127 <= ord(each) < 160 for each in value):
            raise self.wrong(name, "text without control characters", value)
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise self.wrong(name, "valid UTF-8", value) from None
        return value

    def number(self, name: str, most: int) -> int:
        value: int = self.value(name, int, 0)
        if not 0 <= value <= most:
            raise self.wrong(name, f"0 to {most}", value)
        return value

    def below(self, name: str) -> _Fields:
        return _Fields(self.value(name, dict), f"{self.where}: {name}")

    def only(self, known: tuple[str, ...]) -> None:
        for name in self.found:
            if name not in known:
                raise self.wrong(name, f"no other fields than {', '.join(known)}", self.found[name])


def _launcher(fields: _Fields) -> Launcher:
    return Launcher(
        fields.text("host"), fields.number("pid", MOST_PID), fields.number("start", 1 << 62), fields.text("boot_id", "")
    )


def _hosts(fields: _Fields) -> tuple[Host, ...]:
    listed = fields.value("hosts", list)
    made = [_host(each, f"{fields.where}: hosts[{number}]") for number, each in enumerate(listed)]
    return tuple(hosts.checked(made, fields.where))


def _host(found: object, where: str) -> Host:
    if not isinstance(found, dict):
        raise LaunchError(f"{where} is {ascii(found)[:200]}: expected an object with {', '.join(HOST_FACTS)}")
    fields = _Fields(found, where)
    fields.only(HOST_FACTS)
    with errors_at(where):
        values: dict[str, Any] = {"name": host_name(fields.text("name"))}
        for name in HOST_FACTS[1:]:
            given = str(fields.number(name, 65535) or "") if name == "port" else fields.text(name, "")
            if given:
                values[name] = convert(ATTRIBUTES.get(name, name), given)
    return Host(**values, where=where)


def _options(fields: _Fields, given: Options) -> Options:
    """`given`, completed by the recorded options that it leaves at their defaults."""
    fields.only(tuple(RECORDED))
    options, default = AllOptions(), AllOptions()
    for name, option in RECORDED.items():
        if getattr(given, name) == getattr(default, name):
            for value in _values(fields, name, option, getattr(default, name)):
                options = option.apply(options, value, f"{fields.where}: {name}", {})
    changed = {name: getattr(options, name) for name in RECORDED if getattr(options, name) != getattr(default, name)}
    return replace(given, **changed)


def _values(fields: _Fields, name: str, option: Option, default: object) -> list[str]:
    """The texts to give for this option on a command line."""
    assert option.record
    if isinstance(default, tuple):
        return [fields.checked(name, each) for each in fields.value(name, list, [])]
    if isinstance(default, int):
        return [str(number)] if (number := fields.number(name, option.record.most)) else []
    value = fields.text(name, "")
    if value and (expected := option.record.wrong(value)):
        raise fields.wrong(name, expected, value)
    return [value] if value else []
