"""One entry of a list of hosts, a name and attributes as text -> Host values. Pure.

Hosts files, YAML inventories and --hosts all use this module, so they accept the same attributes and report the same
errors. An entry whose name has a range stands for several hosts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.attribute import ATTRIBUTES, ENV, check_known, convert, host_name, ip_address, variable
from dmltrain_launch.job.hosts.range import expand

EACH = ("addr", "hostname")  # differ for each host: their ranges count together with the name's range
LOWEST_PORT = 22  # host:4 is refused, because it probably means MPICH's four slots; port=4 is accepted
IPV6 = re.compile(r"(\[[^\[\]]*:[^\[\]]*\])(?:(:)(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """Text of the user, and where it was given: "hosts:3"."""

    value: str
    where: str


Given = Mapping[str, Text]  # attributes by name, environment variables as env.NAME
NONE: Given = MappingProxyType({})


def entry(spec: Text, given: Given, number: str = "port", defaults: Given = NONE) -> list[Host]:
    """The hosts of one entry. `spec` is [USER@]NAME[:N], where N is the attribute `number`; `given` has the attributes.

    `defaults` apply where neither sets a value. A LaunchError begins with the line.
    """
    with errors_at(spec.where):
        user, name, suffix = split_spec(spec.value)
        names = host_names(name)
        in_spec = {key: Text(value, spec.where) for key, value in (("user", user), (number, suffix)) if value}
        _check_once(in_spec, given)
        if number == "port" and re.fullmatch(r"\d+", suffix, re.ASCII) and 0 < int(suffix[:6]) < LOWEST_PORT:
            raise ValueError(f"{spec.value}: {suffix} would be sshd's port; for slots write {name} slots={suffix}")
    shared: dict[str, Any] = {"where": spec.where}
    each: dict[str, list[Any]] = {}  # field: its value for each name
    environment = []
    for key, text in {**defaults, **given, **in_spec}.items():
        with errors_at(text.where):
            check_known(key)
            if key.startswith(ENV):
                environment.append(variable(key, text.value))
            elif key in EACH:
                each[ATTRIBUTES[key].field] = _in_step(key, text.value, name, len(names))
            else:
                shared[ATTRIBUTES[key].field] = convert(key, text.value)
    with errors_at(spec.where):
        _settle_slots(shared)
    shared["environment"] = tuple(environment)
    return [Host(one, **shared, **{field: each[field][at] for field in each}) for at, one in enumerate(names)]


def host_names(text: str) -> list[str]:
    """The names that a name, an IP address or a range stands for."""
    return [ip_address(text)] if ":" in text else [host_name(each) for each in expand(text)]


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Convert a ValueError of the block to a LaunchError that begins with `where`."""
    try:
        yield
    except ValueError as error:
        raise LaunchError(f"{where}: {error}") from None


def split_spec(spec: str) -> tuple[str, str, str]:
    """User, name and number of [USER@]NAME[:N], "" if missing. IPv6 is [ADDRESS][:N] or the bare address."""
    user, at, rest = spec.rpartition("@")
    if at and not user:
        raise ValueError(f"{spec}: the user name before the @ is missing")
    if match := IPV6.fullmatch(rest):
        name, colon, number = match[1], match[2], match[3] or ""
    elif rest.count(":") > 1:
        name, colon, number = rest, "", ""
    else:
        name, colon, number = rest.partition(":")
    if colon and not number:
        raise ValueError(f"{spec}: the number after the : is missing")
    return user, name, number


def _check_once(in_spec: Given, given: Given) -> None:
    for key, text in in_spec.items():
        if key in given and given[key].value != text.value:
            raise ValueError(f"{key} is given twice: {text.value} with the name, and {key}={given[key].value}")


def _in_step(key: str, value: str, name: str, count: int) -> list[Any]:
    """The value of an attribute for each of the `count` hosts that `name` stands for."""
    values = [value] if ":" in value else expand(value)
    if len(values) != count:
        raise ValueError(
            f"{key}={value}: {name} stands for {count} host{'s' * (count > 1)}, but this has {len(values)}; "
            f"expected a range of the same length, or a line for each host"
        )
    return [convert(key, value) for value in values]


def _settle_slots(fields: dict[str, Any]) -> None:
    """Use slots= as the limit, else max_slots=."""
    most = fields.pop("max_slots", None)
    if most is not None and most < fields.setdefault("slots", most):
        raise ValueError(f"max_slots={most} is less than slots={fields['slots']}")
