"""A path -> the run or runs in its logs.

A file is one run, or several if Keras trained several times. A folder is one run: *.log files with epochs are its
workers, and the others (servers, scheduler) are ignored. Only where no workers of one run can have written its logs,
each of them is a run. In a folder without *.log files, *.csv and *.netoutputs files have the run's metrics. `-` is
standard input.
"""

from __future__ import annotations

import gc
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dmltrain.base.errors import UserError
from dmltrain.report.runs.block import blocks
from dmltrain.report.runs.head import Head
from dmltrain.report.runs.run import FileValues, Run, merge
from dmltrain.report.unread import EXPECTED, Unread
from dmltrain.report.workers import Workers

_CELLS = "cells"  # of an experiment: each is the folder of a run
_TABLES = (".csv", ".netoutputs")
_MOST_EXPLAINED = 3  # logs of a folder that have no epoch


def read(path: str) -> list[Run]:
    """The runs of `path`, at least one; `Run.faults` has their errors. UserError if the path cannot be read."""
    if path == "-":
        return _file_runs(path, sys.stdin.buffer)
    if os.path.isdir(path):
        return _folder_runs(path)
    try:
        with open(path, "rb") as stream:
            return _file_runs(path, stream)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(_unreadable(path, error)) from None


def _file_runs(path: str, stream: BinaryIO) -> list[Run]:
    return _runs(path, survey(stream))


def _runs(path: str, log: Survey) -> list[Run]:
    if not log.runs:
        return [Run(path, (path,), faults=(f"{path}: {log.fault}",), heads=(log.head,))]
    several = len(log.runs) > 1
    return [
        merge(path, [(path, run)], part if several else 0, heads=(log.head,)) for part, run in enumerate(log.runs, 1)
    ]


class Survey(NamedTuple):
    """A log. fault: why it has no run. head: the lines at its start that describe it. dialect: name of its format."""

    runs: list[FileValues]
    fault: str
    head: bytes
    dialect: str = ""


def survey(stream: BinaryIO) -> Survey:
    """Read a log to its end. Passes on the stream's OSError."""
    workers = Workers()
    head = Head()
    unread, understood = Unread(), False
    with _no_collection():
        for block in blocks(stream):
            head.feed(block)
            if not understood:
                unread.feed(block)
            understood = workers.feed(block) or understood
        runs, dialect = workers.runs()
    if runs:
        return Survey(runs, "", head.lines(), dialect)
    return Survey([], unread.explanation(), head.lines())


def scan(stream: BinaryIO) -> tuple[list[FileValues], str]:
    """The runs in a log; if there is none, the reason."""
    return survey(stream)[:2]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's collector of cyclic garbage, of which reading makes none: it takes half the time of a long CSV."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unreadable(path: str, error: OSError | ValueError) -> str:
    reason = (error.strerror if isinstance(error, OSError) else str(error)) or str(error)
    return f"{path}: cannot be read: {reason}"


def folders(paths: Sequence[str]) -> list[str]:
    """The same paths, with a folder of several runs, or of an experiment, replaced by the folders of these runs, in
    natural order."""
    return [folder for path in paths for folder in (_runs_in(path) or [path])]


def _runs_in(path: str) -> list[str]:
    """The folders with logs in a folder that has no log itself. What cannot be read is left to `read`."""
    try:
        if not os.path.isdir(path) or any(Path(path).glob("*.log")):
            return []
        path = os.path.join(path, _CELLS) if _is_experiment(path) else path
        names = sorted(os.listdir(path), key=_natural)
        return [os.path.join(path, name) for name in names if any(Path(path, name).glob("*.log"))]
    except (OSError, ValueError):
        return []


def _is_experiment(path: str) -> bool:
    """Whether dmltrain-experiment writes to the folder; its tables are no logs."""
    return os.path.isfile(os.path.join(path, "experiment.json")) and os.path.isdir(os.path.join(path, _CELLS))


# ---- folders --------------------------------------------------------------------------------------------------------


def _folder_runs(path: str) -> list[Run]:
    """The run whose workers wrote the logs of a folder; several runs if no workers of one run can have written them."""
    if _is_experiment(path):
        return [Run(path, (path,), faults=(_of_experiment(path),))]
    names = sorted(_names(path), key=_natural)
    files: list[tuple[str, Survey]] = []
    faults: list[str] = []
    logs = [name for name in names if name.endswith(".log")] or [name for name in names if name.endswith(_TABLES)]
    for name in logs:
        log = os.path.join(path, name)
        try:
            files.append((log, _survey_file(log)))
        except OSError as error:
            faults.append(_unreadable(log, error))
    own = [(log, survey) for log, survey in files if survey.runs]
    if not own and not faults:
        faults.append(_no_logs(path, names, [os.path.basename(log) for log, _ in files]))
        faults += [f"{log}: {survey.fault}" for log, survey in files if "looks like" in survey.fault][:_MOST_EXPLAINED]
    counts = {len(survey.runs) for _, survey in own}
    notes = _unlike(path, [os.path.basename(log) for log, _ in own if log.endswith(".log")])
    if len({survey.dialect for _, survey in own}) > 1 or len(counts) > 1 or (notes and counts != {1} and own):
        return _separate(path, own, faults)
    heads = [survey.head for _, survey in own or files]  # without epochs any log may describe the run
    starts = [[(log, survey.runs[start]) for log, survey in own] for start in range(max(counts, default=0))]
    if len(starts) > 1 and len(own) == 1:
        return _separate(path, own, faults)
    several = len(starts) > 1
    first, *others = [
        merge(path, of_logs, part if several else 0, heads=heads) for part, of_logs in enumerate(starts or [[]], 1)
    ]
    return [replace(first, faults=tuple(faults), notes=(*notes, *first.notes)), *others]


def _separate(path: str, files: Sequence[tuple[str, Survey]], faults: Sequence[str]) -> list[Run]:
    """Each file's runs, as if its name was given. The first has the folder's faults and a note."""
    formats = sorted({survey.dialect for _, survey in files})
    why = f"of several formats ({', '.join(formats)})" if len(formats) > 1 else "of several runs in one file"
    note = f"{path}: logs {why} are not the workers of one run: each run is shown by itself"
    first, *others = [run for log, survey in files for run in _runs(log, survey)]
    return [replace(first, faults=(*faults, *first.faults), notes=(note, *first.notes)), *others]


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise UserError(_unreadable(path, error)) from None


def _survey_file(log: str) -> Survey:
    """Read a regular file only: opening a fifo named *.log would block."""
    if not stat.S_ISREG(os.stat(log).st_mode):
        return Survey([], "not a regular file", b"")
    with open(log, "rb") as stream:
        return survey(stream)


def _unlike(path: str, logs: list[str]) -> list[str]:
    """A note if names differ in more than numbers: the logs may not belong to the workers of one run."""
    if len({re.sub(r"[0-9]+", "", log) for log in logs}) <= 1:
        return []
    return [f"{path}: {_some(logs)} are treated as the workers of one run; name the files to see them side by side"]


def _of_experiment(path: str) -> str:
    return (
        f"{path}: the folder of an experiment: --summary has a row for each of its runs, {path}/{_CELLS} has their "
        f"folders, and dmltrain-report {path} makes a page of them"
    )


def _no_logs(path: str, names: list[str], without: list[str]) -> str:
    runs = [str(Path(path, name)) for name in names if any(Path(path, name).glob("*.log"))]
    if runs:
        return f"{path}: a folder of several runs: name one or more of {_some(runs)}; --summary has a row for each"
    if without:
        return f"{path}: no epoch in any of its logs ({_some(without)}): {EXPECTED}"
    return f"{path}: no *.log file in this folder: expected the folder of one run, such as logs/JOB"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _natural(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]
