"""The command that runs a cell. Pure, except that paths are relative to the working directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.program import from_here

THIS_MACHINE = "local"  # the launcher that uses no hosts file


@dataclass(frozen=True)
class Where:
    """Where all cells run, as the command line says; it replaces what the file says. `arguments`: for the launcher."""

    hostfile: str = ""
    launcher: str = ""
    arguments: tuple[str, ...] = ()


def launch_words(experiment: Experiment, cell: Cell, where: Where) -> tuple[str, ...]:
    """The options of dmltrain-launch that say what runs where: cells with the same words share a placement."""
    hosts = where.hostfile or (from_here(experiment.path.parent / cell.hosts) if cell.hosts else "")
    given = "" if where.hostfile and cell.launcher == THIS_MACHINE else cell.launcher
    name = where.launcher or given
    words = ["-n", str(cell.workers)]
    words += [] if cell.servers is None else ["-s", str(cell.servers)]
    words += ["--launcher", name] if name else []
    words += ["-H", hosts] if hosts and name != THIS_MACHINE else []
    return (*words, *experiment.arguments, *where.arguments)


def command(
    experiment: Experiment, cell: Cell, program: str, launcher: str, folder: Path, words: Sequence[str]
) -> list[str]:
    """The whole command. `folder`: of the cell's logs. `words`: from launch_words, and what the runner adds."""
    limit = [] if experiment.time_limit is None else ["--timeout", f"{experiment.time_limit:g}"]
    return [launcher, *words, "--log-dir", str(folder), *limit, "--quiet", program, *cell.words]
