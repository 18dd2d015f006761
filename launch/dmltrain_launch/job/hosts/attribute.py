"""The table of host attributes: text -> value of a field of `Host`. Pure.

Invalid text raises ValueError with what is wrong and what was expected.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dmltrain_launch.job.hosts.range import expand
from dmltrain_launch.job.job import OWNED
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER

NAME = re.compile(r"\w[\w.-]{0,252}")  # of a host; with a leading - ssh would read it as an option
USER = re.compile(r"[\w.][\w.@\\+-]*\$?")
INTERFACE = re.compile(r"[^\s/-][^\s/]{0,14}")  # Linux's IFNAMSIZ is 16, including the NUL
FOLDER = re.compile(r"/.*")
PYTHON = re.compile(r"/.+|[\w.+][\w.+-]*")
PATH_OR_COMMAND = "a command such as python3.11, or a path that starts with / (~ is not expanded)"
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
DEVICE = re.compile(r"(\d{1,4})|(\d{1,4}-\d{1,4})|((?:GPU|MIG)-[\w/-]+)", re.ASCII)  # CUDA's names
ENV = "env."
ROLES = (SCHEDULER, SERVER, WORKER)


@dataclass(frozen=True)
class Attribute:
    """One row of the table: the field of `Host`, an example, and text -> value."""

    field: str
    example: str
    convert: Callable[[str], Any]


def convert(name: str, text: str) -> Any:
    """The value of the field for attribute `name`, which `check_known` has accepted."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError(f"{name}={text!r} contains a control character")
    try:
        return ATTRIBUTES[name].convert(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}") from None


def variable(attribute: str, value: str) -> tuple[str, str]:
    """Name and value of the variable in env.NAME=value. Errors do not show the value, which may be secret."""
    name = attribute.removeprefix(ENV)
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"{attribute}: expected the name of an environment variable, such as env.NCCL_DEBUG=INFO")
    if name in OWNED:
        raise ValueError(f"{attribute}: the launcher sets {name} for every process")
    if "\0" in value:
        raise ValueError(f"{attribute}: an environment variable cannot contain a NUL")
    return name, value


def check_known(name: str) -> None:
    if name not in ATTRIBUTES and not name.startswith(ENV):
        raise ValueError(unknown("attribute", name, [*ATTRIBUTES, f"{ENV}NAME"]))


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name, with the most similar known name or all known names."""
    near = get_close_matches(name.casefold(), known, 1)
    return f"unknown {what} {name!r}: " + (f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}")


def ip_address(text: str) -> str:
    """The address as given, without the brackets of IPv6."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError(f"{text} is not an IP address") from None
    return bare


def host_name(text: str) -> str:
    """A name or IP address that SSH can connect to."""
    if ":" in text:
        return ip_address(text)
    if not NAME.fullmatch(text):
        hint = "; a comment needs a space before its #" if "#" in text else "; one host per line" if "," in text else ""
        raise ValueError(f"{text!r} is not a host name: expected letters, digits, . _ and -, without a leading -{hint}")
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or int(text) < 1:
        raise ValueError("expected a whole number, 1 or more")
    return int(text)


def _port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 1 <= int(text) <= 65535:
        raise ValueError("expected the port of its sshd, 1 to 65535")
    return int(text)


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(ip_address(text))
    except ValueError:
        raise ValueError(
            "expected an IP address such as 10.0.0.1, because ps-lite cannot bind names "
            "(use hostname= for the name that SSH connects to)"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError("expected the address of one machine, such as 10.0.0.1")
    return str(address)


def _matching(pattern: re.Pattern[str], expected: str) -> Callable[[str], str]:
    def converted(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"expected {expected}")
        return text

    return converted


def _roles(text: str) -> tuple[str, ...]:
    named = [word.strip() for word in text.split(",")]
    wrong = [each for each in named if each not in ROLES]
    if wrong:
        raise ValueError(unknown("role", wrong[0], ROLES))
    return tuple(role for role in ROLES if role in named)


def _gpus(text: str) -> tuple[str, ...]:
    gpus: list[str] = []
    for part in (word.strip() for word in text.split(",")):
        match = DEVICE.fullmatch(part)
        if not match:
            raise ValueError("expected numbers of devices, such as 0,2 or 0-3")
        gpus += expand(f"[{part}]") if match[2] else [part]
    if len(set(gpus)) < len(gpus):
        raise ValueError("a device is named twice")
    return tuple(gpus)


ATTRIBUTES = {
    "slots": Attribute("slots", "4", _count),
    "max_slots": Attribute("max_slots", "8", _count),  # not a field: the slots if slots= is missing
    "max-slots": Attribute("max_slots", "8", _count),  # Open MPI accepts both spellings
    "addr": Attribute("address", "10.0.0.1", _address),
    "interface": Attribute("interface", "eth1", _matching(INTERFACE, "the name of a network interface, such as eth1")),
    "hostname": Attribute("hostname", "n1.example.org", host_name),
    "user": Attribute("user", "anna", _matching(USER, "the name of a user")),
    "port": Attribute("port", "2222", _port),
    "python": Attribute("python", "/opt/python/bin/python3", _matching(PYTHON, PATH_OR_COMMAND)),
    "workdir": Attribute(
        "workdir", "/data/project", _matching(FOLDER, "a path that starts with / (~ is not expanded)")
    ),
    "gpus": Attribute("gpus", "0,2", _gpus),
    "roles": Attribute("roles", "worker,server", _roles),
}
