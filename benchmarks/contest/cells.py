"""The cells of the scale benchmark (sizes of jobs), and their turns.

Each cell has a twin: a job with as many workers and servers, and one nearly empty key for each slice of the cell. So a
step of the twin shows the cost of the slices without their bytes. Cell, twin and the machine's memory are measured in
turns A B C A B C.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import machine
import numpy as np
import psutil

from contest.team import Block, Contest, Team
from contest.workload import bytes_of, shapes_of
from dmltrain.kvstore.worker.links import sharding

AXES = {"workers": (1, 2, 4, 8), "servers": (1, 2, 4), "keys": (10, 100, 1000), "megabytes": (1.0, 10.0, 100.0, 1000.0)}
BASE = {"workers": 2, "servers": 1, "keys": 100, "megabytes": 100.0}  # other cells differ from it in one axis
TURN_BYTES, MIN_STEPS, MAX_STEPS = 1e9, 3, 30  # bytes of all keys in a turn, roughly; its timed steps
EMPTY_BYTES = 16  # of a twin's key, about
MEMORY_BYTES = 100_000_000  # copied to measure the machine's memory; larger than caches


@dataclass(frozen=True)
class Cell:
    """A job's size; `megabytes` are 10^6 bytes of float32, in ResNet-50's proportions."""

    workers: int
    servers: int
    keys: int
    megabytes: float

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return shapes_of(self.megabytes, self.keys)

    @property
    def slices(self) -> int:
        """Number of slices that each worker pushes in a step."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return sum(map(len, sharding.cut(sizes, [np.dtype(np.float32).itemsize] * len(sizes), [0] * self.servers)))

    @property
    def twin(self) -> Cell:
        """A cell with as many slices, which are nearly empty."""
        return replace(self, keys=self.slices, megabytes=EMPTY_BYTES * self.slices / 1e6)

    @property
    def steps(self) -> int:
        """Timed steps of a turn."""
        return max(MIN_STEPS, min(MAX_STEPS, round(TURN_BYTES / (self.megabytes * 1e6))))

    @property
    def memory_bytes(self) -> float:
        """Approximate maximum: patterns and gradients of each worker, half as much to write and check them, and two
        values of each slice on the servers."""
        return (3 * self.workers + 2) * self.megabytes * 1e6


@dataclass(frozen=True)
class Measured:
    """A cell's turns; each list has one entry for each turn."""

    cell: Cell
    bytes: int  # of the keys
    memcpy: list[float]  # s, of MEMORY_BYTES
    blocks: list[Block]
    twin: list[Block]


def cells_of(axes: Mapping[str, Sequence[float]], full: bool) -> list[Cell]:
    """The base cell, and cells that differ from it in one axis; `full`: all combinations. The base has the values of
    BASE, or the first value of an axis without that value."""
    if full:
        return [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    base = Cell(**{name: BASE[name] if BASE[name] in values else values[0] for name, values in axes.items()})
    varied = [replace(base, **{name: value}) for name, values in axes.items() for value in values]
    return list(dict.fromkeys([base, *varied]))


def fits(cell: Cell) -> bool:
    """Whether this machine has enough free memory for the cell now."""
    return cell.memory_bytes < 0.8 * psutil.virtual_memory().available


def measure(cell: Cell, transport: str, repeats: int, warm_up: int) -> Measured:
    """Start a job for the cell and one for its twin, and measure them in turns. Raises TeamFailed."""
    memcpy: list[float] = []
    teams: list[Team] = []
    with tempfile.TemporaryDirectory(prefix="scale-benchmark-") as name:
        try:
            for job in (cell, cell.twin):
                teams.append(team_of(job, transport, Path(name) / f"{len(teams)}"))
            for _ in range(repeats):
                memcpy.append(machine.memcpy_seconds(MEMORY_BYTES))
                for team, job in zip(teams, (cell, cell.twin), strict=True):
                    team.take_turn(warm_up, job.steps, together=True)
        finally:
            for team in teams:
                team.stop()
    return Measured(cell, bytes_of(cell.shapes), memcpy, teams[0].blocks, teams[1].blocks)


def team_of(job: Cell, transport: str, folder: Path) -> Team:
    """A started job of this size."""
    folder.mkdir()
    contest = Contest("dmltrain", "sum", f"dmltrain, {job}", "with_dmltrain.py", transport=transport)
    options = ["--megabytes", str(job.megabytes), "--keys", str(job.keys)]
    return Team(contest, job.workers, job.servers, options, folder)
