"""What became of a cell: a value for tables, the page and --status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dmltrain.experiment.plan.expression import Value

DONE, ERROR, PENDING, RUNNING = "done", "error", "pending", "running"
STATUSES = (DONE, ERROR, RUNNING, PENDING)


@dataclass(frozen=True)
class Result:
    """One cell's outcome.

    settings: the variables of the grid by name with underscores, in the file's order, and `seed` last if the file has
    seeds. options: the program's final options by name with dashes; None: left out, True: the flag alone.
    folder: the cell's log folder, which may not exist yet. error: why it failed, on one line. seconds: how long it ran.
    """

    id: str
    settings: Mapping[str, Value]
    options: Mapping[str, Value]
    status: str
    folder: Path
    error: str = ""
    seconds: float | None = None
    workers: int = 1
    servers: int | None = None
