"""Separate lists of hosts for workers and servers, -WH and -SH, made into one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from launch import LaunchError
from launch.job.host import Host
from launch.job.role import SCHEDULER, SERVER, WORKER

WORKER_OPTION, SERVER_OPTION = "-WH", "-SH"


def by_roles(worker_hosts: Sequence[Host], server_hosts: Sequence[Host]) -> list[Host]:
    """One list with roles: the workers' hosts in their order, then the others; the first of -SH has the scheduler.

    A host in both lists takes both roles, and what either list says about it holds; LaunchError when they disagree.
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
        raise LaunchError(f"{option}: no host is named; {WORKER_OPTION} and {SERVER_OPTION} each need a hosts file")
    for host in hosts:
        if host.roles:
            raise LaunchError(f"{host.where}: {host.name} has roles=, but {option} already says its role; leave it out")


def _merged(worker: Host, server: Host, roles: tuple[str, ...]) -> Host:
    """A host of both lists. What a list leaves out has the default value."""
    merged: dict[str, Any] = {"name": worker.name, "roles": roles}
    merged["where"] = worker.where if worker.where == server.where else f"{worker.where}, {server.where}"
    for field in fields(Host):
        if field.name not in merged:
            values = {getattr(worker, field.name), getattr(server, field.name)}
            said = sorted(values - {field.default}, key=str)
            if len(said) > 1:
                raise LaunchError(
                    f"{server.where}: {server.name} is in both files, and its {field.name} differs from "
                    f"that at {worker.where}; say the same, or say it once"
                )
            merged[field.name] = said[0] if said else field.default
    return Host(**merged)
