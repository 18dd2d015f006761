"""One entry of a list of hosts, a name and attributes as text -> Host values. Pure.

Every way to write hosts down (a hosts file, a YAML inventory, --hosts) ends here, so they know the same attributes and
refuse the same mistakes. An entry whose name has a range stands for several hosts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from launch import LaunchError
from launch.job.host import Host
from launch.job.hosts.attribute import ATTRIBUTES, ENV, check_known, convert, host_name, ip_address, variable
from launch.job.hosts.range import expand

EACH = ("addr", "hostname")  # what no two hosts share: a range in it goes in step with the name's
LOWEST_PORT = 22  # host:4 means four slots, as MPICH writes them, and is refused; port=4 is taken at its word
IPV6 = re.compile(r"(\[[^\[\]]*:[^\[\]]*\])(?:(:)(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """What someone has written, and where: "hosts:3"."""

    value: str
    where: str


Given = Mapping[str, Text]  # attributes by name, environment variables as env.NAME
NONE: Given = MappingProxyType({})


def entry(spec: Text, given: Given, number: str = "port", defaults: Given = NONE) -> list[Host]:
    """The hosts of one entry: `spec` is [USER@]NAME[:N], where N is the attribute `number`; `given` the attributes;
    `defaults` what holds where neither says otherwise.

    LaunchError says where: what is wrong.
    """
    with errors_at(spec.where):
        user, name, suffix = split_spec(spec.value)
        names = host_names(name)
        said = {key: Text(value, spec.where) for key, value in (("user", user), (number, suffix)) if value}
        _check_once(said, given)
        if number == "port" and re.fullmatch(r"\d+", suffix, re.ASCII) and 0 < int(suffix[:6]) < LOWEST_PORT:
            raise ValueError(f"{spec.value}: {suffix} would be the port of sshd; for slots write {name} slots={suffix}")
    shared: dict[str, Any] = {"where": spec.where}
    each: dict[str, list[Any]] = {}  # field: its value for each name
    environment = []
    for key, text in {**defaults, **given, **said}.items():
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
    """Makes the ValueErrors of its block the LaunchErrors of that place."""
    try:
        yield
    except ValueError as error:
        raise LaunchError(f"{where}: {error}") from None


def split_spec(spec: str) -> tuple[str, str, str]:
    """User, name and number of [USER@]NAME[:N], "" for what is missing; IPv6 is [ADDRESS][:N] or bare."""
    user, at, rest = spec.rpartition("@")
    if at and not user:
        raise ValueError(f"{spec}: a user's name is missing before the @")
    if match := IPV6.fullmatch(rest):
        name, colon, number = match[1], match[2], match[3] or ""
    elif rest.count(":") > 1:
        name, colon, number = rest, "", ""
    else:
        name, colon, number = rest.partition(":")
    if colon and not number:
        raise ValueError(f"{spec}: a number is missing after the :")
    return user, name, number


def _check_once(said: Given, given: Given) -> None:
    for key, text in said.items():
        if key in given and given[key].value != text.value:
            raise ValueError(f"{key} is given twice: {text.value} with the name, and {key}={given[key].value}")


def _in_step(key: str, value: str, name: str, count: int) -> list[Any]:
    """The value of an attribute for each of the `count` hosts that `name` stands for."""
    values = [value] if ":" in value else expand(value)
    if len(values) != count:
        raise ValueError(
            f"{key}={value}: {name} stands for {count} host{'s' * (count > 1)} and this for {len(values)}; "
            f"expected a range of the same length, or a line for each host"
        )
    return [convert(key, each) for each in values]


def _settle_slots(fields: dict[str, Any]) -> None:
    """slots= is the limit, else max_slots=."""
    most = fields.pop("max_slots", None)
    if most is not None and most < fields.setdefault("slots", most):
        raise ValueError(f"max_slots={most} is less than slots={fields['slots']}")
