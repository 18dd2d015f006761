"""Experiments with made logs: the files that cells leave, without running them."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dmltrain.experiment.plan.cell import Cell, cells
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.file import parse
from dmltrain.experiment.result import DONE, ERROR, Result
from dmltrain.experiment.results import outcome
from dmltrain.experiment.results.presentation import presentation
from dmltrain.experiment.results.reading import cells as result_cells

HEAD = """\
dmltrain 0.4.0: train_cifar10.py --network resnet
Network resnet-20: 272541 parameters, input 3x32x32, 10 classes, float32
Host localhost: {machine}, 23.5 GiB memory, Linux 6.18, Python 3.11.7, torch 2.13.0+cpu, 1 threads
Batch 64 per worker, 64 in all; seed 0
Start training with {devices} x cpu, 1 workers, local
Training epochs 0 to 3, 391 batches each
"""
JOB = '{"job": "made", "command": ["train_cifar10.py"], "started": "2026-11-22T04:12:48+0000", "exit_code": 0}\n'
FILE = """\
title: ResNets on several devices
program: train_cifar10.py
options: {network: resnet, num-layers: 20}
grid: {devices: [1, 2, 4], kv-store: [dist_sync, dist_async]}
"""

Log = Callable[[Mapping[str, Any]], str | None]  # settings -> the lines of the cell's log; None: it failed


def experiment(text: str = FILE, name: str = "made.yaml") -> Experiment:
    return parse(text.encode(), Path(name))


def epochs(*values: Mapping[str, object], devices: int = 1, machine: str = "AMD EPYC, 2 cores") -> str:
    """A worker's log: the names and values of each epoch."""
    lines = HEAD.format(devices=devices, machine=machine).splitlines()
    lines += [f"Epoch[{number}] {name}={value}" for number, one in enumerate(values) for name, value in one.items()]
    return "".join(f"2026-11-22 04:12:52,047 Node[0] {line}\n" for line in lines)


def usual(settings: Mapping[str, Any]) -> str:
    """Four epochs of 60 s on one device, the same for the same settings; a few percent differ between seeds."""
    chance = random.Random(repr(sorted(settings.items())))
    found = []
    for number in range(4):
        seconds = 60 / settings.get("devices", 1) * (1 + 0.1 * chance.random())
        accuracy = 1 - 0.7 * 0.7**number * (1 + 0.1 * chance.random())
        lines = {"Train-accuracy": f"{accuracy:.6f}", "Time cost": f"{seconds:.3f}"}
        found.append(lines | {"Validation-accuracy": f"{accuracy - 0.02:.6f}", "Speed": f"{50000 / seconds:.2f}"})
    return epochs(*found, devices=settings.get("devices", 1))


def results(folder: Path, made: Experiment, log: Log = usual, error: str = "exit code 1") -> list[Result]:
    """The results of all cells, with their logs in `folder`. A cell whose log is None has failed with `error`."""
    return [_result(folder, cell, log(cell.settings), error) for cell in cells(made, None).all]


def _result(folder: Path, cell: Cell, text: str | None, error: str) -> Result:
    place = folder / "cells" / cell.id
    place.mkdir(parents=True)
    (place / "worker-0.log").write_text("no epoch\n" if text is None else text)
    (place / "job.json").write_text(JOB)
    status, said = (ERROR, error) if text is None else (DONE, "")
    return Result(cell.id, cell.settings, cell.options, status, place, said, 1.0, cell.workers, cell.servers)


def outcome_of(folder: Path, text: str | Experiment = FILE, log: Log = usual) -> Any:
    """The outcome of an experiment, or of the text of its file, whose cells have these logs."""
    made = experiment(text) if isinstance(text, str) else text
    return outcome(made, presentation(made), result_cells(folder, results(folder, made, log)))
