"""The kvstore types as values, with the guarantees of each. Code uses these fields; it never compares names.

A new type that these fields can describe is one row of TABLE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dmltrain.errors import UserError

OptimizerOn = Literal["workers", "servers"]


@dataclass(frozen=True)
class KVStoreType:
    """`staleness`: how many clocks of the slowest worker a pulled value may miss; with `takes_staleness` the default,
    which the user can change.

    `optimizer_on`: where the optimizer can run, the default first. This decides whether a checkpoint holds the workers'
    optimizer state or the states of all servers.
    """

    name: str
    summary: str
    aliases: tuple[str, ...] = ()
    distributed: bool = True
    synchronous: bool = False  # all workers make each step together, with one gradient
    staleness: float = 0.0
    takes_staleness: bool = False
    optimizer_on: tuple[OptimizerOn, ...] = ("servers",)

    @property
    def needs_server_optimizer(self) -> bool:
        """Whether `set_optimizer` must come before the first push."""
        return self.optimizer_on == ("servers",)

    @property
    def sums_in_host(self) -> bool:
        """Whether a host can send the sum of its workers' pushes, in place of each push, to servers on other hosts."""
        return self.distributed and self.synchronous

    def steps_on_servers(self, update_on_kvstore: bool) -> bool:
        """Whether the optimizer runs on the servers; `update_on_kvstore` is the user's choice."""
        return self.needs_server_optimizer or (update_on_kvstore and "servers" in self.optimizer_on)

    def bound(self, staleness: float | None) -> float:
        """The bound on staleness, in clocks, given the user's --staleness. Raises UserError."""
        if staleness is None:
            return self.staleness
        if not self.takes_staleness:
            owners = " or ".join(names(lambda each: each.takes_staleness))
            raise UserError(f"--staleness is an option of kvstore {owners}; this is {self.name}")
        if not staleness >= 0:
            raise UserError(f"--staleness {staleness}: expected 0 or more clocks")
        return float(staleness)


TABLE = (
    KVStoreType(
        "local",
        "one process; sums its devices; no servers",
        ("device",),
        distributed=False,
        synchronous=True,
        optimizer_on=("workers",),
    ),
    KVStoreType(
        "dist_sync",
        "each step uses the gradients of all workers",
        ("dist_device_sync", "dist_sync_device"),
        synchronous=True,
        optimizer_on=("workers", "servers"),
    ),
    KVStoreType("dist_async", "each push is a step; no worker waits", ("dist_async_device",), staleness=math.inf),
    KVStoreType(
        "dist_ssp",
        "each push is a step; no worker is more than --staleness steps ahead of the slowest worker",
        staleness=3.0,
        takes_staleness=True,
    ),
)
TYPES = {name: each.name for each in TABLE for name in (each.name, *each.aliases)}  # accepted name -> the type's name
_BY_NAME = {name: each for each in TABLE for name in (each.name, *each.aliases)}


def find(name: str) -> KVStoreType:
    """The type of an accepted name. Raises UserError, which lists the names."""
    if name not in _BY_NAME:
        raise UserError(f"unknown kvstore {name!r}; choose one of {', '.join(TYPES)}")
    return _BY_NAME[name]


def names(which: Callable[[KVStoreType], bool]) -> list[str]:
    """The names of the types that `which` selects, for help texts and errors."""
    return [each.name for each in TABLE if which(each)]
