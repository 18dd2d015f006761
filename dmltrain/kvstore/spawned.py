"""Processes that a program of a job has started itself with multiprocessing, as torch.multiprocessing.spawn does: each
inherits the environment, and so the place in the job that the program has already."""

from __future__ import annotations

import sys

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError

FIX = "call the function itself in place of spawn; dmltrain-launch starts all workers (-n 4 for 4 GPUs)"


def hint() -> str:
    """Why a second process may have the same place in the job as this one."""
    if started := _name():
        return f"this process ({started}) was started by multiprocessing, such as torch.multiprocessing.spawn: {FIX}"
    return f"if the program uses torch.multiprocessing.spawn: {FIX}"


def check(environment: Environment) -> None:
    """Raise UserError in a process of a launcher's job that was started by spawn."""
    if environment.job and _name().startswith("SpawnProcess"):
        place = f"{environment.role} {environment.index}"
        raise UserError(f"{place} of the job is there already: {hint()}")


def _name() -> str:
    """The name that multiprocessing gave this process; "" if another program has started it."""
    module = sys.modules.get("multiprocessing")  # which each of its processes has imported
    return str(module.current_process().name) if module and module.parent_process() else ""
