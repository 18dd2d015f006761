"""The paths from the user -> what the page shows: runs with their workers, jobs and samples.

A folder of a job with restarts has several runs, one for each attempt that has epochs. A folder of an experiment has
those of its cells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dmltrain.base.errors import UserError
from dmltrain.report import reading
from dmltrain.report.label import labels
from dmltrain.report.page import experiment, samples
from dmltrain.report.page.experiment import ExperimentOnPage
from dmltrain.report.runs import job_record
from dmltrain.report.runs.facts import Facts, facts
from dmltrain.report.runs.job_record import JobRecord
from dmltrain.report.runs.run import Run

RESTART = re.compile(r"restart-([1-9]\d{0,5})")
PREVIOUS = re.compile(r"previous-([1-9]\d{0,5})")


@dataclass(frozen=True)
class Worker:
    """One worker's own log. epochs: epoch as printed -> key -> every value printed for it."""

    name: str
    epochs: Mapping[int, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class PageRun:
    """A run on the page. number: from 0, chooses colour and marker. folder: with its logs, "" for standard input.
    hosts: what usage.csv says of them."""

    number: int
    label: str
    run: Run
    folder: str
    hosts: tuple[samples.HostSamples, ...]

    @cached_property
    def facts(self) -> Facts:
        return facts(self.run)

    @cached_property
    def workers(self) -> list[Worker]:
        """The values of each worker. If an epoch lacks values of some workers, the files are read again: then the order
        of the values does not tell their workers."""
        files = self.run.files
        names = [os.path.basename(file).removesuffix(".log") for file in files] if self.folder else ["worker"]
        if len(files) <= 1:
            return [Worker(name, self.run.epochs) for name in names[:1]]
        if all(len(numbers) == len(files) for values in self.run.epochs.values() for numbers in values.values()):
            return [Worker(name, _of_file(self.run, place)) for place, name in enumerate(names)]
        return [Worker(name, reading.read(file)[0].epochs) for name, file in zip(names, files, strict=True)]

    def counted(self, epoch: int) -> int:
        """An epoch counted from 1, or an iteration as it is."""
        return epoch + (1 - self.run.first if self.run.first is not None else 0)


@dataclass(frozen=True)
class Folder:
    """A job's log folder. label: as on the page. previous: what earlier runs of the same folder say, by folder."""

    label: str
    path: str
    job: JobRecord
    previous: tuple[tuple[str, JobRecord], ...] = ()


@dataclass(frozen=True)
class Sources:
    """Everything that the page shows. faults: errors in the input; notes: remarks for readers."""

    runs: tuple[PageRun, ...] = ()
    folders: tuple[Folder, ...] = ()
    experiments: tuple[ExperimentOnPage, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Collected:
    """What was read of the paths so far. folders: the first run of each folder, and its path."""

    runs: list[Run] = field(default_factory=list)
    folders: list[tuple[Run | str, str]] = field(default_factory=list)
    experiments: list[ExperimentOnPage] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read(paths: Sequence[str]) -> Sources:
    """What is at `paths`; what cannot be read is a fault."""
    sources = _Collected()
    for path in paths:
        try:
            if (cells := experiment.read(path)) is not None:
                sources.experiments.append(cells)
                for folder in cells.folders():
                    _add(sources, folder)
            else:
                _add(sources, path)
        except UserError as error:
            sources.faults.append(str(error))
    return _sources(sources)


def _add(sources: _Collected, path: str) -> None:
    runs = reading.read(path)
    for attempt in _numbered(path, RESTART):
        runs += [run for run in reading.read(attempt) if run.epochs]
    sources.runs += runs
    if os.path.isdir(path):
        sources.folders.append((runs[0], path))


def _sources(sources: _Collected) -> Sources:
    faults, notes = list(sources.faults), [note for run in sources.runs for note in run.notes]
    names = labels(sources.runs)
    shown = [
        PageRun(number, label, run, folder, tuple(samples.read(folder) if folder else ()))
        for number, (label, run) in enumerate(zip(names, sources.runs, strict=True))
        for folder in [_folder_of(run)]
    ]
    folders = []
    for run, path in sources.folders:
        try:
            if (known := job_record.read(path)) is not None:
                label = names[next(place for place, other in enumerate(sources.runs) if other is run)]
                folders.append(Folder(label, path, known, tuple(_previous(path))))
        except UserError as error:
            notes.append(str(error))
    faults += [fault for run in sources.runs for fault in run.faults]
    return Sources(tuple(shown), tuple(folders), tuple(sources.experiments), tuple(faults), tuple(notes))


def _previous(path: str) -> Iterator[tuple[str, JobRecord]]:
    for folder in _numbered(path, PREVIOUS):
        if (known := job_record.read(folder)) is not None:
            yield folder, known


def _numbered(path: str, names: re.Pattern[str]) -> list[str]:
    """The folders restart-1, restart-2, ... of a log folder, in order."""
    try:
        matches = [match for name in os.listdir(path) if (match := names.fullmatch(name))]
    except OSError:  # it is a file
        return []
    folders = [os.path.join(path, match[0]) for match in sorted(matches, key=lambda match: int(match[1]))]
    return [folder for folder in folders if os.path.isdir(folder)]


def _folder_of(run: Run) -> str:
    """The folder of a run's logs; a job's own if one of its files was named."""
    if run.log == "-":
        return ""
    return run.log if os.path.isdir(run.log) else os.path.dirname(run.log) or "."


def _of_file(run: Run, place: int) -> dict[int, dict[str, Sequence[float]]]:
    """The values of one file: `merge` keeps the order of the files."""
    return {
        epoch: {key: numbers[place : place + 1] for key, numbers in values.items()}
        for epoch, values in run.epochs.items()
    }
