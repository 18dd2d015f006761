"""How long cells will take: from cells that are done, else from a measured step (DMLTRAIN_MEASURE)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmltrain.base import env
from dmltrain.experiment import answers
from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.plan.grid import SEED
from dmltrain.experiment.program import Program
from dmltrain.experiment.result import DONE, Result

MEASURE = "DMLTRAIN_MEASURE"
MEASURE_SECONDS = 2.0  # of steps
LONGEST = 600.0  # s, of one measurement: a large network on a slow machine needs a while for its first step
START_SECONDS = 4.0  # of a job before its first step and after its last one; measured with PyTorch on two cores
EXAMPLES = {"cifar10": 50_000, "mnist": 60_000, "digits": 1_437}  # of training
# Options that do not change the time of a step.
INDIFFERENT = (
    *("seed", "lr", "lr_factor", "lr_step_epochs", "lr_policy", "lr_power", "wd", "mom", "num_epochs", "max_iter"),
    *("num_examples", "num_val_examples", "model_prefix", "kv_store", "staleness", "disp_batches", "data_dir", "top_k"),
    *("local_steps", "outer_lr", "outer_momentum"),
)


@dataclass(frozen=True)
class Estimate:
    """The expected time of one cell; seconds None: not known. basis: from what it is estimated."""

    seconds: float | None
    basis: str


def key(cell: Cell) -> tuple[Any, ...]:
    """A key that is the same for cells that differ in their seed only."""
    return tuple((name, value) for name, value in cell.settings.items() if name != SEED)


def from_done(cells: Sequence[Cell], results: Sequence[Result]) -> dict[tuple[Any, ...], float]:
    """Mean seconds of the cells that are done, for each row of the table."""
    seconds_of: dict[tuple[Any, ...], list[float]] = {}
    for cell, result in zip(cells, results, strict=True):
        if result.status == DONE and result.seconds is not None:
            seconds_of.setdefault(key(cell), []).append(result.seconds)
    return {name: sum(seconds) / len(seconds) for name, seconds in seconds_of.items()}


def quick(cell: Cell, done: Mapping[tuple[Any, ...], float]) -> float | None:
    """The expected seconds of a cell, for the progress line: those of its row, else the mean of all rows so far."""
    if not done:
        return None
    return done.get(key(cell), sum(done.values()) / len(done))


Measured = Callable[[Cell], "Mapping[str, Any] | str"]


def estimate(
    cell: Cell, done: Mapping[tuple[Any, ...], float], answer: Mapping[str, Any], measured: Measured
) -> Estimate:
    """`measured(cell)`: the values of DMLTRAIN_MEASURE, or why there are none."""
    if key(cell) in done:
        return Estimate(done[key(cell)], "cells that are done")
    step = measured(cell)
    if isinstance(step, str):
        return Estimate(None, step)
    steps = number_of_steps(cell, answers.options(answer))
    seconds = step.get("seconds_per_step")
    if steps is None or not isinstance(seconds, (int, float)):
        return Estimate(None, "the number of steps is not known: give num-examples or max-iter")
    return Estimate(START_SECONDS + steps * seconds, f"{steps} steps of {seconds:.3g} s, measured here")


def number_of_steps(cell: Cell, options: Mapping[str, Any]) -> int | None:
    """The number of steps of the whole run."""
    if isinstance(options.get("max_iter"), int):
        return int(options["max_iter"])
    examples = options.get("num_examples") or EXAMPLES.get(str(options.get("dataset")))
    epochs, batch = options.get("num_epochs"), options.get("batch_size")
    if not isinstance(examples, int) or not isinstance(epochs, int) or not isinstance(batch, int) or batch < 1:
        return None
    return epochs * max(1, math.ceil(examples / (batch * cell.workers)))


class Measurer:
    """Measures steps, once for cells whose steps are the same."""

    def __init__(self, program: Program, answered: Mapping[tuple[str, ...], Mapping[str, Any]]):
        self.program, self.said = program, answered
        self.known: dict[tuple[Any, ...], Mapping[str, Any] | str] = {}

    def __call__(self, cell: Cell) -> Mapping[str, Any] | str:
        options = answers.options(self.said.get(cell.words, {}))
        if not options:
            return f"{self.program.path} does not measure its steps"
        kind = (cell.workers, *(repr(value) for name, value in sorted(options.items()) if name not in INDIFFERENT))
        if kind not in self.known:
            self.known[kind] = measure(self.program.path, cell)
        return self.known[kind]


def measure(program: str, cell: Cell) -> Mapping[str, Any] | str:
    """Time steps of a cell's worker alone, with its share of this machine's cores."""
    cores = max(1, len(os.sched_getaffinity(0)) // cell.workers)
    variables = {MEASURE: f"{MEASURE_SECONDS:g}", "OMP_NUM_THREADS": str(cores)}
    try:
        done = subprocess.run(
            [sys.executable, program, *cell.words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            env=env.inherited(**variables),
        )
    except subprocess.TimeoutExpired:
        return f"a step could not be measured within {LONGEST:g} s"
    measured = parse(done.stdout)
    if measured is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return f"a step could not be measured: {last[:200]}"
    return measured


def parse(output: str) -> Mapping[str, Any] | None:
    """The values in what a program printed."""
    for line in output.splitlines():
        if line.startswith(f"{MEASURE} "):
            try:
                values = json.loads(line.removeprefix(f"{MEASURE} "))
            except (ValueError, RecursionError):
                return None
            return values if isinstance(values, dict) else None
    return None
