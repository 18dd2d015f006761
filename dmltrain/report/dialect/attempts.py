"""Several starts of a training in one log -> runs. Values of different starts are never mixed.

A start whose first epoch (or iteration) is not after that of the run before is a run of its own. A later one goes on
with the run: what followed its first epoch before is left out, with a note. Workers whose lines do not name them may
also write epochs that go back: they are told from starts by how often each epoch has its values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmltrain.report.runs.run import FileValues, Values
from dmltrain.report.runs.stamp import Clock


@dataclass(frozen=True)
class LogSection:
    """What a log has from one start to the next. first: the first epoch or iteration that it says. began: seconds from
    the log's first line to its first one, None without times. spoken: a line may only have spoken of that epoch."""

    first: int
    values: FileValues
    began: float | None = None
    spoken: bool = True

    def settled(self, clock: Clock) -> LogSection:
        """The same with times that are final."""
        times = ((epoch, clock.settled(seconds)) for epoch, seconds in self.values.elapsed.items())
        elapsed = {epoch: seconds for epoch, seconds in times if seconds is not None}
        notes = tuple(dict.fromkeys((*self.values.notes, *clock.notes())))
        values = replace(self.values, elapsed=elapsed, notes=notes)
        return replace(self, values=values, began=clock.settled(self.began))

    @property
    def epochs(self) -> list[int]:
        return sorted({*self.values.epochs, *self.values.snapshots})


def runs(starts: Sequence[LogSection], named: bool) -> list[FileValues]:
    """The runs of a log's starts. named: lines say whose they are, or the log is one writer's."""
    starts = _without_mentions(starts)
    if len(starts) > 1 and not named and _interleaved(starts):
        starts = [_joined(starts)]
    sections: list[LogSection] = []
    for start in starts:
        if not sections:
            sections.append(start)
        elif start.first <= sections[-1].first:
            sections.append(replace(start, values=_since(start.values, start.began)))
        else:
            sections[-1] = _gone_on(sections[-1], start)
    return [start.values for start in sections if start.epochs]


def _without_mentions(starts: Sequence[LogSection]) -> list[LogSection]:
    """The starts with values of their first epoch. Another line only spoke of that epoch."""
    kept = list(starts[:1])
    for start in starts[1:]:
        is_late = bool(start.epochs) and _late(kept[-1], start)
        if not start.spoken or (start.epochs and start.first == start.epochs[0] and not is_late):
            kept.append(start)
        elif start.epochs and not is_late and _goes_back(kept[-1], start):
            kept.append(replace(start, first=start.epochs[0]))
        else:
            kept[-1] = _joined([kept[-1], start])
    return [start for start in kept if start.epochs] or kept[:1]


def _goes_back(before: LogSection, start: LogSection) -> bool:
    """Whether a start's values are of an epoch before the last one, or of the last one again."""
    first, last = start.epochs[0], max(before.epochs, default=-1)
    again = start.values.epochs.get(first, {}).keys() & before.values.epochs.get(first, {}).keys()
    return first < last or (first == last and bool(again))


def _late(before: LogSection, start: LogSection) -> bool:
    """Whether a start is no more than late lines of an epoch, none of which came before."""
    (epoch, *others) = start.epochs
    new = start.values.epochs.get(epoch, {}).keys()
    return not others and bool(new) and not new & before.values.epochs.get(epoch, {}).keys()


def _interleaved(starts: Sequence[LogSection]) -> bool:
    """Whether several writers, who do not name themselves, are at different epochs."""
    all_values = [start.values for start in starts]
    several = any(len(values) > 1 for values_of_start in all_values for values in values_of_start.epochs.values())
    if several and all(map(_is_in_sequence, all_values)):
        return False
    for values_of_start in all_values:
        counts = [_count(values) for _, values in sorted(values_of_start.epochs.items())][:-1]
        if len(set(counts)) > 1:
            return True
    if len(all_values) < 3 or len({start.first for start in starts}) == 1:
        return False
    total: dict[int, int] = {}
    for values_of_start in all_values:
        for epoch, values in values_of_start.epochs.items():
            total[epoch] = total.get(epoch, 0) + _count(values)
    counts = [count for _, count in sorted(total.items())]
    return min(counts[:-1], default=0) > 1 and len(set(counts[:-1])) == 1


def _is_in_sequence(section: FileValues) -> bool:
    """Whether one writer seems to have written it: each metric once in an epoch, and no epoch is left out. Of several
    epochs the first has several metrics."""
    epochs = sorted(section.epochs)
    once = all(_count(values) == 1 for values in section.epochs.values())
    whole = len(epochs) < 2 or len(section.epochs[epochs[0]]) > 1
    return once and whole and epochs == list(range(epochs[0], epochs[-1] + 1) if epochs else ())


def _count(values: Values) -> int:
    return max(map(len, values.values()), default=0)


def _joined(starts: Sequence[LogSection]) -> LogSection:
    """The values of all starts together, as of one with several workers."""
    epochs: dict[int, Values] = {}
    snapshots, elapsed = dict[int, dict[str, float]](), dict[int, float]()
    for start in starts:
        for epoch, values in start.values.epochs.items():
            for key, numbers in values.items():
                epochs.setdefault(epoch, {}).setdefault(key, array("d")).extend(numbers)
        snapshots |= start.values.snapshots
        elapsed |= start.values.elapsed
    notes = tuple(dict.fromkeys(note for start in starts for note in start.values.notes))
    joined = replace(starts[0].values, epochs=epochs, snapshots=snapshots, elapsed=elapsed, notes=notes)
    return replace(starts[0], values=joined)


def _since(section: FileValues, began: float | None) -> FileValues:
    """The same with times since this start."""
    if began is None:
        return section
    return replace(section, elapsed={epoch: round(seconds - began, 6) for epoch, seconds in section.elapsed.items()})


def _gone_on(before: LogSection, start: LogSection) -> LogSection:
    """The run that `start` goes on with. The pause between both is no time of the run."""
    old, new = before.values, _since(start.values, start.began)
    kept = {epoch: values for epoch, values in old.epochs.items() if epoch < start.first}
    snapshots = {epoch: values for epoch, values in old.snapshots.items() if epoch < start.first}
    elapsed = {epoch: seconds for epoch, seconds in old.elapsed.items() if epoch < start.first}
    until = max(elapsed.values(), default=0.0)
    left_out = len(kept) < len(old.epochs) or len(snapshots) < len(old.snapshots)
    note = again("iteration" if old.first is None else "epoch", start.first)
    continued = replace(
        old,
        epochs=kept | new.epochs,
        snapshots=snapshots | new.snapshots,
        elapsed=elapsed | {epoch: round(until + seconds, 6) for epoch, seconds in new.elapsed.items()},
        notes=tuple(dict.fromkeys((*old.notes, *new.notes, *([note] if left_out else [])))),
    )
    return replace(before, values=continued)


def again(unit: str, first: int) -> str:
    """The note on a start that goes on from an epoch or iteration that the log has already."""
    return (
        f"{unit} {first} comes again, as after a restart: from there on the last start is shown, and what the one "
        "before had is left out"
    )
