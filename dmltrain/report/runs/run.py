"""The values of one training run, by epoch, as in its logs: neither averaged nor rounded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt

from dmltrain.report.runs import unnamed

# key (train_accuracy, seconds, ...) -> every value printed for it, in the order of the log
Values = dict[str, "array[float]"]


@dataclass(frozen=True)
class FileValues:
    """The values of one run in one file.

    epochs: epoch as printed -> values of its epoch lines. snapshots: epoch -> training metrics of its last batch line,
    used if the epoch has no such value. first: number of the first epoch (0 or 1), None if the log counts iterations.
    elapsed: epoch -> seconds from the log's first line to the epoch's last, where lines have times. unnamed: the log
    does not say that its training accuracy is one (`train=0.47`). workers: the same of its other workers, whose lines
    the file has, too.
    """

    epochs: dict[int, Values] = field(default_factory=dict)
    snapshots: dict[int, dict[str, float]] = field(default_factory=dict)
    first: int | None = 0
    notes: tuple[str, ...] = ()
    elapsed: dict[int, float] = field(default_factory=dict)
    unnamed: bool = False
    workers: tuple[FileValues, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run: an entry of the JSON list, a group of columns of a table.

    log: the path from the user. files: the files read. part: 1, 2, ... if one file has several runs, else 0. epochs:
    ascending, as printed. from_last_batch: the epochs whose training accuracy is that of the last batch line. faults:
    errors in the input (the program exits with 2). notes: remarks for readers of the table. heads: of each file the
    lines at its start that describe the run. elapsed: epoch -> seconds since the start of the run, of its last worker.
    """

    log: str
    files: tuple[str, ...] = ()
    epochs: dict[int, Values] = field(default_factory=dict)
    first: int | None = 0
    part: int = 0
    from_last_batch: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    heads: tuple[bytes, ...] = ()
    elapsed: dict[int, float] = field(default_factory=dict)


def merge(
    log: str,
    files: Sequence[tuple[str, FileValues]],
    part: int = 0,
    faults: Sequence[str] = (),
    notes: Sequence[str] = (),
    heads: Sequence[bytes] = (),
) -> Run:
    """The run whose workers wrote `files` (path, its values): each epoch has the values of all workers."""
    files = [(path, of_worker) for path, of_file in files for of_worker in (of_file, *of_file.workers)]
    epochs = dict(files[0][1].epochs) if files else {}
    for _, of_file in files[1:]:
        for epoch, values in of_file.epochs.items():
            for key, numbers in values.items():
                epochs.setdefault(epoch, {}).setdefault(key, array("d")).extend(numbers)
    from_last_batch = _stand_in(epochs, [of_file.snapshots for _, of_file in files])
    _derive(epochs)
    doubts = unnamed.rename(epochs, heads) if files and all(of_file.unnamed for _, of_file in files) else ()
    paths, first = tuple(dict.fromkeys(path for path, _ in files)), files[0][1].first if files else 0
    notes = (*notes, *dict.fromkeys(f"{path}: {note}" for path, of_file in files for note in of_file.notes))
    notes = (*notes, *(f"{log}: {doubt}" for doubt in doubts))
    return Run(
        log,
        paths,
        epochs if all(map(lt, epochs, islice(epochs, 1, None))) else dict(sorted(epochs.items())),
        first,
        part,
        from_last_batch,
        tuple(faults),
        notes,
        tuple(heads),
        _elapsed([of_file.elapsed for _, of_file in files]),
    )


def _elapsed(files: Sequence[dict[int, float]]) -> dict[int, float]:
    """The end of each epoch at the last worker. Times are relative to each log's start: clocks of hosts may differ."""
    epochs = sorted({epoch for elapsed in files for epoch in elapsed})
    return {epoch: max(elapsed[epoch] for elapsed in files if epoch in elapsed) for epoch in epochs}


def _stand_in(epochs: dict[int, Values], snapshots: list[dict[int, dict[str, float]]]) -> tuple[int, ...]:
    """Add training metrics from batch lines to epochs without them; return the epochs that got an accuracy.

    Only the last line of an epoch in a file is used, also if several workers write to the file.
    """
    lacking = {
        (epoch, key)
        for of_file in snapshots
        for epoch, metrics in of_file.items()
        for key in metrics
        if key not in epochs.get(epoch, ())
    }
    for of_file in snapshots:
        for epoch, metrics in of_file.items():
            for key, number in metrics.items():
                if (epoch, key) in lacking:
                    epochs.setdefault(epoch, {}).setdefault(key, array("d")).append(number)
    return tuple(sorted(epoch for epoch, key in lacking if key == "train_accuracy"))


def _derive(epochs: dict[int, Values]) -> None:
    """gluoncv prints errors, `err-top1=0.2267`: the accuracy is 1 minus the error, or 100 minus it in percent."""
    for split in ("train", "validation"):
        for error, accuracy in (("err_top1", "accuracy"), ("err_top5", "top_k_accuracy_5")):
            error, accuracy = f"{split}_{error}", f"{split}_{accuracy}"
            holders = [values for values in epochs.values() if error in values and accuracy not in values]
            whole = 100.0 if any(number > 1 for values in holders for number in values[error]) else 1.0
            for values in holders:
                values[accuracy] = array("d", (round(whole - number, 9) for number in values[error]))
