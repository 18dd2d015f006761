"""Hosts files, YAML inventories and --hosts lists -> Host values.

`read` opens the file; everything else is pure. `by_roles` merges the lists of -WH (workers) and -SH (servers). A
LaunchError begins with the line, `hosts:3: `.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.entry import Text, entry
from dmltrain_launch.job.hosts.range import split_list
from dmltrain_launch.job.hosts.text import LINE_END
from dmltrain_launch.job.hosts.text import parse as parse_text
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER

WORKER_OPTION, SERVER_OPTION = "-WH", "-SH"
MOST_BYTES = 1 << 20  # a thousand hosts need a tenth of this; a larger file is not a list of hosts
EXPECTED = "expected a hosts file: one host per line, such as h1 slots=2 (hosts.example explains)"
LIST_OPTION = "--hosts"


def read(path: str | os.PathLike[str]) -> list[Host]:
    """The hosts of the file at `path`, in its order; .yaml and .yml are YAML inventories."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise LaunchError(f"{name}: no such file; {EXPECTED}; to list hosts directly, use --hosts h1,h2") from None
    except IsADirectoryError:
        raise LaunchError(f"{name} is a folder; {EXPECTED}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise LaunchError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}; {EXPECTED}") from None
    return parse(data, name)


def parse(data: bytes, name: str) -> list[Host]:
    """The hosts in the content of the file `name`, whose extension selects the format."""
    text = _decoded(data, name)
    if name.lower().endswith((".yaml", ".yml")):
        from dmltrain_launch.job.hosts.inventory import parse as parse_yaml  # yaml takes a while to import

        return checked(parse_yaml(text, name), name)
    return checked(_slots_of_lines(parse_text(text, name)), name)


def _slots_of_lines(hosts: Sequence[Host]) -> list[Host]:
    """The hosts, each once, with the sum of the slots of its lines.

    In some files a host has a line for each slot, as in PBS_NODEFILE, or several lines with slots, as for Open MPI.
    Lines are added only if all lines of the file are of one of these kinds and have no other attributes.
    """
    kinds = {host.slots is None for host in hosts}
    plain = all(replace(host, slots=None) == Host(host.name, where=host.where) for host in hosts)
    names = [host.name for host in hosts]
    if len(kinds) > 1 or not plain or len({host.where for host in hosts}) < len(hosts) or len(names) == len(set(names)):
        return list(hosts)
    merged: dict[str, Host] = {}
    for host in hosts:
        before = merged.get(host.name, replace(host, slots=0))
        merged[host.name] = replace(before, slots=(before.slots or 0) + (1 if host.slots is None else host.slots))
    return list(merged.values())


def from_list(text: str) -> list[Host]:
    """The hosts of `--hosts a:2,anna@b,n[1-3]`, where :N is the number of slots, as in Open MPI and Horovod."""
    parts = split_list(text) if text.strip() else []
    if not all(parts):
        raise LaunchError(f"{LIST_OPTION} {text}: a name is missing between two commas or at the end")
    hosts = [host for part in parts for host in entry(Text(part, LIST_OPTION), {}, number="slots")]
    return checked(hosts, LIST_OPTION)


def _decoded(data: bytes, name: str) -> str:
    if len(data) > MOST_BYTES:
        raise LaunchError(f"{name} is larger than {MOST_BYTES >> 20} MiB; {EXPECTED}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise LaunchError(f"{name} is UTF-16; save it as UTF-8")
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        bad = len(LINE_END.findall(data[: error.start].decode("latin-1"))) + 1
        raise LaunchError(f"{name}:{bad}: byte 0x{data[error.start]:02x} is not UTF-8; {EXPECTED}") from None
    for number, line in enumerate(LINE_END.split(text), 1):
        if any(character < " " and character not in "\t\f" for character in line):
            raise LaunchError(f"{name}:{number}: binary data; {EXPECTED}")
    return text


def checked(hosts: Sequence[Host], name: str) -> list[Host]:
    """The hosts, if there are any and each has a name of its own."""
    if not hosts:
        example = f"{LIST_OPTION} h1:2,h2:2" if name == LIST_OPTION else "one per line, such as h1 slots=2"
        raise LaunchError(f"{name}: no hosts; expected {example}")
    seen: dict[str, Host] = {}
    for host in hosts:
        first = seen.setdefault(host.name.casefold(), host)
        if first is not host:
            raise LaunchError(_twice(host, first))
    return list(hosts)


def _twice(host: Host, first: Host) -> str:
    if host.where == LIST_OPTION:
        return f"{LIST_OPTION}: {host.name} is given twice; for two slots write {host.name}:2"
    return (
        f"{host.where}: {host.name} is already given at {first.where}; for more processes use slots=, "
        f"for a second sshd on the machine use another name: NAME hostname={host.target} port=2222"
    )


def by_roles(worker_hosts: Sequence[Host], server_hosts: Sequence[Host]) -> list[Host]:
    """One list with roles: the workers' hosts in their order, then the others. The first of -SH gets the scheduler.

    A host in both lists gets both roles and the attributes of both. LaunchError if an attribute differs.
    """
    _check(WORKER_OPTION, worker_hosts)
    _check(SERVER_OPTION, server_hosts)
    servers = {host.name.casefold(): host for host in server_hosts}
    merged = []
    for host in worker_hosts:
        also = servers.pop(host.name.casefold(), None)
        merged.append(_merged(host, also, (SERVER, WORKER)) if also else replace(host, roles=(WORKER,)))
    merged += [replace(host, roles=(SERVER,)) for host in servers.values()]
    first = server_hosts[0].name.casefold()
    return [replace(host, roles=(SCHEDULER, *host.roles)) if host.name.casefold() == first else host for host in merged]


def _check(option: str, hosts: Sequence[Host]) -> None:
    if not hosts:
        raise LaunchError(f"{option}: no hosts; {WORKER_OPTION} and {SERVER_OPTION} each need a hosts file")
    for host in hosts:
        if host.roles:
            raise LaunchError(
                f"{host.where}: {host.name} has roles=, but {option} already sets its role; remove roles="
            )


def _merged(worker: Host, server: Host, roles: tuple[str, ...]) -> Host:
    """A host of both lists. An attribute that a list does not set has its default value."""
    merged: dict[str, Any] = {"name": worker.name, "roles": roles}
    merged["where"] = worker.where if worker.where == server.where else f"{worker.where}, {server.where}"
    for field in fields(Host):
        if field.name not in merged:
            values = {getattr(worker, field.name), getattr(server, field.name)}
            given = sorted(values - {field.default}, key=str)
            if len(given) > 1:
                raise LaunchError(
                    f"{server.where}: {server.name} is in both files, and its {field.name} differs from "
                    f"that at {worker.where}; use the same value, or set it in one file only"
                )
            merged[field.name] = given[0] if given else field.default
    return Host(**merged)
