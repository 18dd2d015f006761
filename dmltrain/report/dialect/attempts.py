"""Several starts of a training in one log -> runs. Values of different starts are never mixed.

A start is a new run if its first epoch (or iteration) is not after the first one of the run before. Otherwise it
continues that run: the run's earlier values from that epoch on are left out, with a note. If several workers write to a
log and their lines do not name them, epochs may go back as well. How often each epoch has its values tells the cases
apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmltrain.report.runs.run import FileValues, Values
from dmltrain.report.runs.stamp import Clock


@dataclass(frozen=True)
class LogSection:
    """The part of a log from one start to the next. first: its first epoch or iteration. began: seconds from the log's
    first line to the first one of this part; None without times. spoken: a line may only mention the epoch `first`."""

    first: int
    values: FileValues
    began: float | None = None
    spoken: bool = True

    def settled(self, clock: Clock) -> LogSection:
        """A copy with the final times, which are known after the last block of the log."""
        times = ((epoch, clock.settled(seconds)) for epoch, seconds in self.values.elapsed.items())
        elapsed = {epoch: seconds for epoch, seconds in times if seconds is not None}
        notes = tuple(dict.fromkeys((*self.values.notes, *clock.notes())))
        values = replace(self.values, elapsed=elapsed, notes=notes)
        return replace(self, values=values, began=clock.settled(self.began))

    @property
    def epochs(self) -> list[int]:
        return sorted({*self.values.epochs, *self.values.snapshots})


def runs(starts: Sequence[LogSection], named: bool) -> list[FileValues]:
    """The runs of a log's starts. named: the lines name their worker, or the log has one writer."""
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
    """The starts that have values of their first epoch. A start without them is only a line that mentions the epoch."""
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
    """Whether the first values of a start are of an epoch before the last one, or repeat values of the last one."""
    first, last = start.epochs[0], max(before.epochs, default=-1)
    restart_note = start.values.epochs.get(first, {}).keys() & before.values.epochs.get(first, {}).keys()
    return first < last or (first == last and bool(restart_note))


def _late(before: LogSection, start: LogSection) -> bool:
    """Whether a start has nothing but late lines of one epoch, with values that the epoch did not have before."""
    (epoch, *others) = start.epochs
    new = start.values.epochs.get(epoch, {}).keys()
    return not others and bool(new) and not new & before.values.epochs.get(epoch, {}).keys()


def _interleaved(starts: Sequence[LogSection]) -> bool:
    """Whether several workers, which the lines do not name, write to the log while they are in different epochs."""
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
    """Whether one worker seems to have written the section: each metric is there once in an epoch, and no epoch is left
    out. If there are several epochs, the first one has several metrics."""
    epochs = sorted(section.epochs)
    once = all(_count(values) == 1 for values in section.epochs.values())
    whole = len(epochs) < 2 or len(section.epochs[epochs[0]]) > 1
    return once and whole and epochs == list(range(epochs[0], epochs[-1] + 1) if epochs else ())


def _count(values: Values) -> int:
    return max(map(len, values.values()), default=0)


def _joined(starts: Sequence[LogSection]) -> LogSection:
    """The values of all starts together, as if they were one with several workers."""
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
    """A copy with times since this start, not since the log's first line."""
    if began is None:
        return section
    return replace(section, elapsed={epoch: round(seconds - began, 6) for epoch, seconds in section.elapsed.items()})


def _gone_on(before: LogSection, start: LogSection) -> LogSection:
    """The run `before` as `start` continues it. The pause between both does not count as time of the run."""
    old, new = before.values, _since(start.values, start.began)
    kept = {epoch: values for epoch, values in old.epochs.items() if epoch < start.first}
    snapshots = {epoch: values for epoch, values in old.snapshots.items() if epoch < start.first}
    elapsed = {epoch: seconds for epoch, seconds in old.elapsed.items() if epoch < start.first}
    until = max(elapsed.values(), default=0.0)
    left_out = len(kept) < len(old.epochs) or len(snapshots) < len(old.snapshots)
    note = restart_note("iteration" if old.first is None else "epoch", start.first)
    continued = replace(
        old,
        epochs=kept | new.epochs,
        snapshots=snapshots | new.snapshots,
        elapsed=elapsed | {epoch: round(until + seconds, 6) for epoch, seconds in new.elapsed.items()},
        notes=tuple(dict.fromkeys((*old.notes, *new.notes, *([note] if left_out else [])))),
    )
    return replace(before, values=continued)


def restart_note(unit: str, first: int) -> str:
    """The note on a start that continues a run from an epoch or iteration that the log has already."""
    return (
        f"{unit} {first} comes again, as after a restart: from there on the last start is shown, and what the one "
        "before had is left out"
    )
