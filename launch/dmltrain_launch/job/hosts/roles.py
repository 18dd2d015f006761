"""Merge the lists of hosts of -WH (workers) and -SH (servers). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER

WORKER_OPTION, SERVER_OPTION = "-WH", "-SH"


def by_roles(worker_hosts: Sequence[Host], server_hosts: Sequence[Host]) -> list[Host]:
    """One list with roles: the workers' hosts in their order, then the others. The first of -SH gets the scheduler.

    A host in both lists gets both roles and the attributes of both. LaunchError if an attribute differs.
    """
    _check(WORKER_OPTION, worker_hosts)
    _check(SERVER_OPTION, server_hosts)
    servers = {host.name.casefold(): host for host in server_hosts}
    found = []
    for host in worker_hosts:
        also = servers.pop(host.name.casefold(), None)
        found.append(_merged(host, also, (SERVER, WORKER)) if also else replace(host, roles=(WORKER,)))
    found += [replace(host, roles=(SERVER,)) for host in servers.values()]
    first = server_hosts[0].name.casefold()
    return [replace(each, roles=(SCHEDULER, *each.roles)) if each.name.casefold() == first else each for each in found]


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
