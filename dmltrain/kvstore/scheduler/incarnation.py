"""Where the newest incarnation of an elastic job's scheduler is.

If a scheduler is lost, the launcher starts the next incarnation of it, and writes its number and address into a file
on each host: {"incarnation": 2, "host": "10.0.0.3", "port": 40000}. Numbers grow, and no process goes back to an older
one.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from dmltrain.base.env import Environment
from dmltrain.kvstore.transport.address import shown


@dataclass(frozen=True)
class Incarnation:
    """The scheduler `number` listens at this address."""

    number: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"the scheduler at {shown(self.host, self.port)}"


def newest(environment: Environment) -> Incarnation:
    """The one in the file, unless there is no file, it cannot be read, or the environment has a later one."""
    own = Incarnation(environment.incarnation, environment.root_host, environment.root_port)
    if not environment.scheduler_file:
        return own
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(Path(environment.scheduler_file).read_text())
        if int(found["incarnation"]) > own.number:
            return Incarnation(int(found["incarnation"]), str(found["host"]), int(found["port"]))
    return own
