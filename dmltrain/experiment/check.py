"""Checks before the first cell: all problems of all cells together, each with what to do about it."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.experiment import answers
from dmltrain.experiment.command import Where, launch_words
from dmltrain.experiment.hosts import names_hosts
from dmltrain.experiment.launch import Planned
from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.program import Program

NAMED = 3  # cells that a problem names
MOST_PLANS = 64  # distinct placements that are checked
LOG_BYTES = 1 << 20  # of a process, generous: 300 epochs of a worker take about 0.3 MB
OPTIMIZER_STATE = 3  # sizes of the model in a checkpoint: weights and two of the optimizer
ELEMENT = 4  # bytes of a weight
DOWNLOADED = ("cifar10", "mnist")
FILES = ("data_train", "data_val", "data_train_idx", "data_val_idx", "data_root")
RANK = "{rank}"
NVIDIA_SMI_SECONDS = 20.0

Answers = Mapping[tuple[str, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class CheckResult:
    """problems: the experiment does not start. notes: what could not be checked, or is worth knowing."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckRequest:
    """What is checked, and functions for what is outside of this program. gpus(): how many this machine has, None if
    unknown. free(path): free bytes of its file system."""

    experiment: Experiment
    program: Program
    where: Where
    folder: Path
    plan: Callable[[tuple[str, ...]], Planned]
    gpus: Callable[[], int | None]
    free: Callable[[Path], int]


def check(asked: CheckRequest, cells: Sequence[Cell], answers_of: Answers) -> CheckResult:
    """All problems of these cells. `answers_of`: command line -> the program's answer to it."""
    problems = [
        *_options(cells, answers_of),
        *_places(asked, cells),
        *_kvstores(cells, answers_of),
        *_devices(asked, cells, answers_of),
        *_data(asked, cells, answers_of),
        *_disk(asked, cells, answers_of),
    ]
    return CheckResult(tuple(problems), tuple(_notes(asked, cells, answers_of)))


def _named(cells: Sequence[Cell]) -> str:
    rest = len(cells) - NAMED
    return ", ".join(cell.id for cell in cells[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _grouped(pairs: Iterator[tuple[str, Cell]]) -> Iterator[str]:
    """One line for each problem, with the cells that have it."""
    cells_of: dict[str, list[Cell]] = {}
    for problem, cell in pairs:
        cells_of.setdefault(problem, []).append(cell)
    for problem, those in cells_of.items():
        yield f"{problem} (cell{'s' * (len(those) > 1)} {_named(those)})"


def _options(cells: Sequence[Cell], answers_of: Answers) -> Iterator[str]:
    return _grouped(
        (f"{answers_of[cell.words]['error']}", cell) for cell in cells if answers_of.get(cell.words, {}).get("error")
    )


def _places(asked: CheckRequest, cells: Sequence[Cell]) -> Iterator[str]:
    """What the launcher says about the number of processes and the hosts."""
    errors: dict[tuple[str, ...], str] = {}
    for words in list(dict.fromkeys(launch_words(asked.experiment, cell, asked.where) for cell in cells))[:MOST_PLANS]:
        errors[words] = asked.plan(words).error
    those = [(errors.get(launch_words(asked.experiment, cell, asked.where), ""), cell) for cell in cells]
    return _grouped((error, cell) for error, cell in those if error)


def _kvstores(cells: Sequence[Cell], answers_of: Answers) -> Iterator[str]:
    def pairs() -> Iterator[tuple[str, Cell]]:
        for cell in cells:
            answer = answers_of.get(cell.words, {})
            name = answers.options(answer).get("kv_store")
            if answer.get("distributed") is True and cell.servers == 0:
                yield f"kv-store {name} needs servers and the job has none: set servers below launch to 1 or more", cell
            if answer.get("distributed") is False and cell.workers > 1:
                yield (
                    f"kv-store {name} is for one worker and the job has {cell.workers}: use dist_sync, or 1 worker",
                    cell,
                )

    return _grouped(pairs())


def _devices(asked: CheckRequest, cells: Sequence[Cell], answers_of: Answers) -> Iterator[str]:
    """GPUs that this machine does not have. The launcher checks those of other hosts."""
    need = [
        (cell, _gpus_of(answers.options(answers_of.get(cell.words, {})))) for cell in cells if _is_here(asked, cell)
    ]
    need = [(cell, number) for cell, number in need if number]
    have = asked.gpus() if need else None
    if have is None:
        return iter(())
    cpus = "'devices=cpu:{devices}'" if "devices" in asked.experiment.variables else "devices=cpu"
    return _grouped(
        (
            f"{number} GPUs are needed, and this machine has {have}: use fewer devices, a `where`, -H HOSTS, or CPUs "
            f"(--set {cpus})",
            cell,
        )
        for cell, number in need
        if number > have
    )


def _gpus_of(options: Mapping[str, Any]) -> int:
    """How many GPUs the highest index needs."""
    names = [*(options.get("devices") or []), *(options.get("gpus") or [])]
    indexes = [name.partition(":")[2] for name in names if isinstance(name, str) and name.startswith("gpu")]
    return max((int(index) + 1 for index in indexes if index.isdecimal()), default=0)


def _is_here(asked: CheckRequest, cell: Cell) -> bool:
    """Whether a cell runs on this machine alone."""
    return not names_hosts(launch_words(asked.experiment, cell, asked.where))


def _data(asked: CheckRequest, cells: Sequence[Cell], answers_of: Answers) -> Iterator[str]:
    """Data files that options name and that do not exist. Data sets by name are downloaded when they are needed."""

    def pairs() -> Iterator[tuple[str, Cell]]:
        for cell in cells:
            if not _is_here(asked, cell):
                continue
            options = answers.options(answers_of.get(cell.words, {}))
            for name in FILES:
                value = options.get(name)
                for path in value if isinstance(value, list) else [value] if isinstance(value, str) else []:
                    if isinstance(path, str) and RANK not in path and not os.path.exists(path):
                        yield f"--{name.replace('_', '-')} {path}: no such file or folder", cell

    return _grouped(pairs())


def _disk(asked: CheckRequest, cells: Sequence[Cell], answers_of: Answers) -> Iterator[str]:
    """File systems that have too little space for logs and checkpoints."""
    needs: dict[Path, int] = {asked.folder: 0}
    for cell in cells:
        processes = cell.workers + (cell.workers if cell.servers is None else cell.servers) + 2
        needs[asked.folder] += processes * LOG_BYTES
        answer = answers_of.get(cell.words, {})
        prefix, size = answers.options(answer).get("model_prefix"), answer.get("parameters")
        if isinstance(prefix, str) and prefix and isinstance(size, int):
            folder = Path(prefix).parent
            needs[folder] = needs.get(folder, 0) + size * ELEMENT * OPTIMIZER_STATE * _checkpoints(answer)
    for folder, size in needs.items():
        free = asked.free(folder)
        if free < size:
            yield (
                f"{folder}: {free >> 20} MiB are free, and logs and checkpoints of {len(cells)} cells take up to "
                f"{size >> 20} MiB: free some space, or use --output DIR, --only, or a larger save-period"
            )


def _checkpoints(answer: Mapping[str, Any]) -> int:
    options = answers.options(answer)
    epochs, period = options.get("num_epochs"), options.get("save_period")
    known = isinstance(epochs, int) and isinstance(period, int) and period > 0
    return max(1, epochs // period) if known else 1  # type: ignore[operator]


def _notes(asked: CheckRequest, cells: Sequence[Cell], answers_of: Answers) -> Iterator[str]:
    if not answers_of and not asked.program.checks:
        yield (f"{asked.program.path} does not say which options it takes: a mistake in them shows when a cell runs")
    if any(_gpus_of(answers.options(answer)) for answer in answers_of.values()) and asked.gpus() is None:
        yield "the number of GPUs of this machine is not known: a cell with too many of them will fail"
    for name in DOWNLOADED:
        folders = {
            str(options.get("data_dir") or f"data/{name}")
            for options in map(answers.options, answers_of.values())
            if options.get("dataset") == name and not options.get("data_train") and not options.get("benchmark")
        }
        for folder in sorted(folders):
            if not os.path.isdir(folder):
                yield f"{folder} does not exist: the first cell downloads {name} to it"
    twins: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        twins.setdefault((cell.words, cell.workers, cell.servers, cell.launcher, cell.hosts), []).append(cell)
    for those in twins.values():
        if len(those) > 1:
            yield f"cells {_named(those)} have the same command, so that they measure the same"


def count_gpus() -> int | None:
    """How many this machine has, by nvidia-smi: 0 if there is no device file of a GPU, None if it is not known."""
    if shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else None
    return None if glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd") else 0
