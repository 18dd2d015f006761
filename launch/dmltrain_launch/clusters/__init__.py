"""The table of launchers: each is a module or folder here. `dmltrain_launch.clusters.launcher` says what it has."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Any

from dmltrain_launch.clusters.launcher import Allocating, Cluster, Launcher, Released
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Option

__all__ = ["LAUNCHERS", "AllOptions", "Allocating", "Cluster", "Launcher", "Released", "make_cluster"]

NAMES = (
    "local",
    "ssh",
    "mpi",
    "slurm",
    "kubernetes",
    "yarn",
    "ray",
)
LAUNCHERS: dict[str, Launcher] = {name: importlib.import_module(f"{__name__}.{name}").LAUNCHER for name in NAMES}
# The options of all launchers: a command line has any of them, and --launcher may come last.
AllOptions: type[Options] = make_dataclass(
    "AllOptions",
    (),
    bases=tuple(dict.fromkeys(row.options for row in reversed(LAUNCHERS.values()) if row.options is not Options)),
    frozen=True,
    namespace={"__module__": __name__},
)


def part_of(name: str, module: str, kind: str) -> Any:
    """The class `kind` of the launcher `name`, from this module of its folder."""
    path = f"{__name__}.{name}.{module}" if module else f"{__name__}.{name}"
    return getattr(importlib.import_module(path), kind)


def make_cluster(name: str, options: Options, hosts: Sequence[Host] | None = None) -> Cluster:
    """The cluster of the launcher `name`."""
    cluster: Cluster = part_of(name, LAUNCHERS[name].cluster, "Cluster")(options, hosts)
    return cluster


def launchers_with(option: Option) -> list[str]:
    """The launchers that accept the option."""
    some = [name for name, row in LAUNCHERS.items() if option.field in row.fields]
    return some or list(LAUNCHERS)


def any_with(option: Option) -> str:
    """The same as text, such as "ssh, mpi or slurm"."""
    *others, last = launchers_with(option)
    return f"{', '.join(others)} or {last}" if others else last


def listing() -> str:
    """The table as text, for --help and error messages."""
    return ", ".join(f"{name} ({row.meaning})" for name, row in LAUNCHERS.items())
