"""The values of one training run, by epoch, as its logs hold them: nothing averaged, nothing rounded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

# key (train_accuracy, seconds, ...) -> every value printed for it, in the order of the log
Values = dict[str, "array[float]"]


@dataclass(frozen=True)
class Found:
    """What one file says of one run.

    epochs: epoch as printed -> values of its epoch lines. snapshots: epoch -> training metrics of its last batch line,
    for those not printed per epoch. first: what epochs are counted from (0 or 1), None where iterations are counted.
    """

    epochs: dict[int, Values] = field(default_factory=dict)
    snapshots: dict[int, dict[str, float]] = field(default_factory=dict)
    first: int | None = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run: an entry of the JSON list, a group of columns of a table.

    log: the path as the user gave it. files: what it was read from. part: 1, 2, ... where one file holds several runs,
    else 0. epochs: ascending, as printed. from_last_batch: the epochs whose training accuracy is that of a last batch
    line. faults: what is wrong with the input (the program ends with 2). notes: what a reader of the table should know.
    """

    log: str
    files: tuple[str, ...] = ()
    epochs: dict[int, Values] = field(default_factory=dict)
    first: int | None = 0
    part: int = 0
    from_last_batch: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def merge(
    log: str, files: Sequence[tuple[str, Found]], part: int = 0, faults: Sequence[str] = (), notes: Sequence[str] = ()
) -> Run:
    """The run whose workers wrote `files` (path, what was found in it): their values side by side."""
    epochs = dict(files[0][1].epochs) if files else {}
    for _, found in files[1:]:
        for epoch, values in found.epochs.items():
            for key, numbers in values.items():
                epochs.setdefault(epoch, {}).setdefault(key, array("d")).extend(numbers)
    from_last_batch = _stand_in(epochs, [found.snapshots for _, found in files])
    _derive(epochs)
    paths, first = tuple(path for path, _ in files), files[0][1].first if files else 0
    notes = (*notes, *(f"{path}: {note}" for path, found in files for note in found.notes))
    return Run(log, paths, dict(sorted(epochs.items())), first, part, from_last_batch, tuple(faults), notes)


def _stand_in(epochs: dict[int, Values], snapshots: list[dict[int, dict[str, float]]]) -> tuple[int, ...]:
    """Give epochs the training metrics that only their batch lines have; return those whose accuracy is such a one.

    Only the last line of a file counts, also where several workers write into it: it is a glimpse of an epoch.
    """
    lacking = {
        (epoch, key)
        for found in snapshots
        for epoch, metrics in found.items()
        for key in metrics
        if key not in epochs.get(epoch, ())
    }
    for found in snapshots:
        for epoch, metrics in found.items():
            for key, number in metrics.items():
                if (epoch, key) in lacking:
                    epochs.setdefault(epoch, {}).setdefault(key, array("d")).append(number)
    return tuple(sorted(epoch for epoch, key in lacking if key == "train_accuracy"))


def _derive(epochs: dict[int, Values]) -> None:
    """gluoncv prints errors, `err-top1=0.2267`: accuracy is 1 minus it, 100 minus it where a log counts in percent."""
    for split in ("train", "validation"):
        for error, accuracy in (("err_top1", "accuracy"), ("err_top5", "top_k_accuracy_5")):
            error, accuracy = f"{split}_{error}", f"{split}_{accuracy}"
            holders = [values for values in epochs.values() if error in values and accuracy not in values]
            whole = 100.0 if any(number > 1 for values in holders for number in values[error]) else 1.0
            for values in holders:
                values[accuracy] = array("d", (round(whole - number, 9) for number in values[error]))
