"""The values of one training run, by epoch, as its logs hold them: nothing averaged, nothing rounded."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

Values = dict[str, array]  # key (train_accuracy, seconds, ...) -> every value printed for it, in the order of the log


@dataclass(frozen=True)
class Found:
    """What one file says of one run.

    epochs: epoch as printed -> values of its epoch lines. snapshots: epoch -> training metrics of its last batch line, for logs that
    print no training metric per epoch. first: what the log counts its epochs from (0 or 1), or None where it counts iterations.
    """

    epochs: dict[int, Values] = field(default_factory=dict)
    snapshots: dict[int, dict[str, float]] = field(default_factory=dict)
    first: int | None = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run: what a row of JSON and a group of columns of a table show.

    log: the path as the user gave it. part: 1, 2, ... where one file holds several runs, else 0. files: the files it was read from.
    epochs: ascending, as printed. from_last_batch: the epochs whose training metrics are those of a last batch line.
    faults: what is wrong with the input (the program ends with 2). notes: what a reader of the table should know.
    """

    log: str
    files: tuple[str, ...] = ()
    epochs: dict[int, Values] = field(default_factory=dict)
    first: int | None = 0
    part: int = 0
    from_last_batch: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def merge(log: str, files: Iterable[tuple[str, Found]], part: int = 0, faults: tuple[str, ...] = ()) -> Run:
    """The run whose workers wrote `files` (path, what was found in it): their values side by side."""
    files = list(files)
    epochs: dict[int, Values] = {}
    for _, found in files:
        for epoch, values in found.epochs.items():
            for key, numbers in values.items():
                epochs.setdefault(epoch, {}).setdefault(key, array("d")).extend(numbers)
    stood_in = _stand_in(epochs, [found.snapshots for _, found in files])
    _derive(epochs)
    firsts = [found.first for _, found in files]
    return Run(log, tuple(path for path, _ in files), dict(sorted(epochs.items())), min(firsts, key=lambda n: n is None, default=0),
               part, stood_in, faults, tuple(f"{path}: {note}" for path, found in files for note in found.notes))


def _stand_in(epochs: dict[int, Values], snapshots: list[dict[int, dict[str, float]]]) -> tuple[int, ...]:
    """Give each epoch without a training metric that of its last batch line in each file; return those epochs.

    Only the last line counts, also where several workers share a file: a batch line is a glimpse, not a worker's epoch.
    """
    lacking = {epoch for found in snapshots for epoch in found
               if not any(key.startswith("train_") for key in epochs.get(epoch, ()))}
    for found in snapshots:
        for epoch in lacking & found.keys():
            for key, number in found[epoch].items():
                epochs.setdefault(epoch, {}).setdefault(key, array("d")).append(number)
    return tuple(sorted(lacking))


def _derive(epochs: dict[int, Values]) -> None:
    """gluoncv prints errors, `err-top1=0.2267`: accuracy is one minus it, a hundred minus it where a log counts in percent."""
    for split in ("train", "validation"):
        for error, accuracy in ((f"{split}_err_top1", f"{split}_accuracy"), (f"{split}_err_top5", f"{split}_top_k_accuracy_5")):
            holders = [values for values in epochs.values() if error in values and accuracy not in values]
            whole = 100.0 if any(number > 1 for values in holders for number in values[error]) else 1.0
            for values in holders:
                values[accuracy] = array("d", (round(whole - number, 9) for number in values[error]))
