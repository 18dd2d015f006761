"""The one table of places a job can run on. A cluster is a module with

hosts(options) -> [Host]           the hosts of the job; LaunchError names what is wrong with the options
connect(host, mark) -> Channel     start an agent for the job `mark` on one of them
"""

from __future__ import annotations

import importlib
from types import ModuleType

# name: what it is. The module of that name below launch.clusters is imported when it is chosen.
CLUSTERS = {
    "local": "all processes on this machine",
}


def cluster(name: str) -> ModuleType:
    """The module of the cluster `name`."""
    return importlib.import_module(f"launch.clusters.{name}")


def listing() -> str:
    """The table in words, for --help and for errors."""
    return ", ".join(f"{name} ({meaning})" for name, meaning in CLUSTERS.items())
