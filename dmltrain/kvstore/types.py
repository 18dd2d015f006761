"""The kvstore types as values, with the guarantees of each. Code uses these fields; it never compares names.

A new type that these fields can describe is one row of TABLE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from dmltrain.base.errors import UserError
from dmltrain.kvstore.local_steps import LocalSteps, checked

OptimizerOn = Literal["workers", "servers"]


@dataclass(frozen=True)
class KVStoreType:
    """`staleness`: how many clocks of the slowest worker a pulled value may miss; with `takes_staleness` the default,
    which the user can change.

    `optimizer_on`: where the optimizer can run, the default first. This decides whether a checkpoint holds the workers'
    optimizer state or the states of all servers.

    `local_steps`: the defaults of a type whose workers step alone between two rounds; None where each step is a round.
    """

    name: str
    summary: str
    aliases: tuple[str, ...] = ()
    distributed: bool = True
    synchronous: bool = False  # a round has one push of every worker, and all continue with its value
    staleness: float = 0.0
    takes_staleness: bool = False
    optimizer_on: tuple[OptimizerOn, ...] = ("servers",)
    local_steps: LocalSteps | None = None

    @property
    def needs_server_optimizer(self) -> bool:
        """Whether `set_optimizer` must come before the first push."""
        return self.optimizer_on == ("servers",)

    @property
    def steps_together(self) -> bool:
        """Whether all workers make each step together, with one gradient."""
        return self.synchronous and not self.steps_alone

    @property
    def steps_alone(self) -> bool:
        """Whether each worker makes steps of its own between two rounds."""
        return self.local_steps is not None

    @property
    def takes_factors(self) -> bool:
        """Whether a worker's optimizer can compute the gradient of all workers from sufficient factors."""
        return self._steps_on_workers

    @property
    def can_be_elastic(self) -> bool:
        """Whether a job can go on without a worker that is lost: exactly, if it is synchronous."""
        return self.distributed

    @property
    def _steps_on_workers(self) -> bool:
        """Whether each step can be one round of all workers, with the optimizer on each."""
        return self.distributed and self.steps_together and "workers" in self.optimizer_on

    @property
    def sums_in_host(self) -> bool:
        """Whether a host can send the sum of its workers' pushes, in place of each push, to servers on other hosts."""
        return self.distributed and self.synchronous

    def steps_on_servers(self, update_on_kvstore: bool) -> bool:
        """Whether the optimizer runs on the servers; `update_on_kvstore` is the user's choice."""
        return self.needs_server_optimizer or (update_on_kvstore and "servers" in self.optimizer_on)

    def bound(self, staleness: float | None, name: str = "staleness") -> float:
        """The bound on staleness, in clocks, given the user's `staleness`. Raises UserError, which calls it `name`."""
        if staleness is None:
            return self.staleness
        if not self.takes_staleness:
            owners = " or ".join(names(lambda type_: type_.takes_staleness))
            raise UserError(
                f"{name} is an option of kvstore {owners}; this is {self.name}: use {owners}, or leave {name} out"
            )
        if isinstance(staleness, bool) or not isinstance(staleness, Real) or not staleness >= 0:
            raise UserError(f"{name} {staleness!r}: expected 0 or more clocks")
        return float(staleness)

    def averaging(
        self,
        local_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        name: Callable[[str], str] = str,
    ) -> LocalSteps | None:
        """How often and how the workers' weights are averaged, given the user's choices; None where each step is a
        round. Raises UserError, which calls each of these parameters `name(parameter)`."""
        values = {"local_steps": local_steps, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
        given = [parameter for parameter, value in values.items() if value is not None]
        default = self.local_steps
        if default is not None:
            return checked(
                LocalSteps(
                    default.steps if local_steps is None else local_steps,
                    default.outer_lr if outer_lr is None else outer_lr,
                    default.outer_momentum if outer_momentum is None else outer_momentum,
                ),
                name,
            )
        if given:
            owners = " or ".join(names(lambda type_: type_.steps_alone))
            raise UserError(
                f"{name(given[0])} is an option of kvstore {owners}; this is {self.name}: use {owners}, or leave "
                f"{name(given[0])} out"
            )
        return None


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
    KVStoreType(
        "dist_local",
        "each worker makes --local-steps steps alone, then the workers' weights are averaged",
        synchronous=True,
        optimizer_on=("workers",),
        local_steps=LocalSteps(50, outer_lr=1.0, outer_momentum=0.0),
    ),
)
TYPES = {
    name: type_.name for type_ in TABLE for name in (type_.name, *type_.aliases)
}  # accepted name -> the type's name
_BY_NAME = {name: type_ for type_ in TABLE for name in (type_.name, *type_.aliases)}


def find(name: str) -> KVStoreType:
    """The type of an accepted name. Raises UserError, which lists the names."""
    if not isinstance(name, str) or name not in _BY_NAME:
        raise UserError(f"unknown kvstore {name!r}; choose one of {', '.join(TYPES)}")
    return _BY_NAME[name]


def names(which: Callable[[KVStoreType], bool]) -> list[str]:
    """The names of the types that `which` selects, for help texts and errors."""
    return [type_.name for type_ in TABLE if which(type_)]
