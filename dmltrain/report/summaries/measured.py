"""The values of a run over its workers and epochs, for the columns of a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from dmltrain.logs import record
from dmltrain.report.runs.facts import Facts
from dmltrain.report.runs.run import Run
from dmltrain.report.table import AGGREGATES, largest, mean, total, whole_of_accuracies

ACCURACY = "validation_accuracy"
LOSSES = ("validation_cross_entropy", "validation_loss", "validation_nll_loss")
_SPENT = tuple(record.metric(name) for name in record.COMMUNICATION if name != "bound")  # seconds


class MeasuredRun:
    """A run, its facts, and its values. `aggregate` (mean, max, last) combines the values of an epoch's workers."""

    def __init__(self, run: Run, known: Facts, aggregate: str = "mean") -> None:
        self.run, self.facts, self._aggregate = run, known, AGGREGATES[aggregate]

    @cached_property
    def done(self) -> list[int]:
        """The completed epochs: those that have more than the values of a batch line."""
        unfinished = {
            epoch
            for epoch in self.run.from_last_batch
            if all(key.startswith("train_") for key in self.run.epochs[epoch])
        }
        return [epoch for epoch in self.run.epochs if epoch not in unfinished]

    @cached_property
    def later(self) -> list[int]:
        """The completed epochs without the run's first, unless it is the only one."""
        return self.done[1:] if len(self.done) > 1 and self.done[0] == self.run.first else self.done

    def counted(self) -> int | None:
        """The number of completed epochs; None if the log counts iterations."""
        return None if self.run.first is None else len(self.done)

    @cached_property
    def epoch_seconds(self) -> dict[int, float]:
        """Completed epoch -> its seconds; {} if the log counts iterations: then a row has any number of them."""
        cells = self.cells("seconds")
        return {} if self.run.first is None else {epoch: cells[epoch] for epoch in self.done if epoch in cells}

    @cached_property
    def workers(self) -> int | None:
        """The number of workers, as the log or job.json says; else how many different values most epochs have."""
        return self.facts.workers or _writers(self.run)

    def cells(self, key: str) -> dict[int, float]:
        """Epoch -> value of the epoch, from all workers by the aggregate. Accuracies are fractions."""
        return self._combined(key, self._aggregate)  # type: ignore[arg-type]

    def means(self, key: str) -> dict[int, float]:
        """Epoch -> mean of all workers, whatever the aggregate. Accuracies are fractions."""
        return self._combined(key, mean)

    def sums(self, key: str) -> dict[int, float]:
        """Epoch -> sum over all workers; without the epochs of which a worker's value is missing.

        An epoch that was repeated after a restart has more values than workers, and their mean counts for each worker.
        """
        workers = self.workers or 0
        return {
            epoch: mean(values[key]) * workers
            for epoch, values in self.run.epochs.items()
            if key in values and len(values[key]) >= workers > 0
        }

    def largest(self, key: str) -> float | None:
        """The largest value of all workers and epochs; None if there is none."""
        numbers = [number for values in self.run.epochs.values() if key in values for number in values[key]]
        return largest(numbers) if numbers else None

    def shares(self) -> dict[str, float]:
        """Each kind of time in the lines Communication -> its share of all of them; {} if the run has none."""
        totals = {key: total(self._finite(key)) for key in _SPENT}
        whole = total(totals.values())
        return {key: total / whole for key, total in totals.items()} if whole > 0 else {}

    def _finite(self, key: str) -> Iterable[float]:
        return (
            number
            for epoch in self.later
            if key in (values := self.run.epochs[epoch])
            for number in values[key]
            if math.isfinite(number)
        )

    def _combined(self, key: str, aggregate: Callable[[Sequence[float]], float]) -> dict[int, float]:
        whole = self._whole if "accuracy" in key else 1.0
        return {epoch: aggregate(values[key]) / whole for epoch, values in self.run.epochs.items() if key in values}

    @cached_property
    def _whole(self) -> float:
        return whole_of_accuracies(self.run)


def over(cells: Mapping[int, float], epochs: Sequence[int]) -> float | None:
    """The mean of the cells of `epochs`; None if there is none."""
    known = [cells[epoch] for epoch in epochs if epoch in cells]
    return mean(known) if known else None


def _writers(run: Run) -> int | None:
    """The number of workers, estimated: the largest number of different values that a key has in an epoch, in most
    epochs. Equal values do not count, because a log of one worker may have every line twice."""
    counts = Counter(max(len(set(numbers)) for numbers in values.values()) for values in run.epochs.values() if values)
    return counts.most_common(1)[0][0] if counts else None
