"""Several starts of a training in one log -> runs. Values of different starts are never mixed.

A start whose first epoch (or iteration) is not after that of the run before is a run of its own. A later one goes on
with the run: what followed its first epoch before is left out, with a note. Workers whose lines do not name them may
also write epochs that go back: they are told from starts by how often each epoch has its values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmltrain.report.runs.run import Found, Values
from dmltrain.report.runs.stamp import Clock


@dataclass(frozen=True)
class Start:
    """What a log has from one start to the next. first: the first epoch or iteration that it says. began: seconds from
    the log's first line to its first one, None without times. spoken: a line may only have spoken of that epoch."""

    first: int
    found: Found
    began: float | None = None
    spoken: bool = True

    def settled(self, clock: Clock) -> Start:
        """The same with times that are final."""
        times = ((epoch, clock.settled(seconds)) for epoch, seconds in self.found.elapsed.items())
        elapsed = {epoch: seconds for epoch, seconds in times if seconds is not None}
        notes = tuple(dict.fromkeys((*self.found.notes, *clock.notes())))
        found = replace(self.found, elapsed=elapsed, notes=notes)
        return replace(self, found=found, began=clock.settled(self.began))

    @property
    def epochs(self) -> list[int]:
        return sorted({*self.found.epochs, *self.found.snapshots})


def runs(starts: Sequence[Start], named: bool) -> list[Found]:
    """The runs of a log's starts. named: lines say whose they are, or the log is one writer's."""
    starts = _without_mentions(starts)
    if len(starts) > 1 and not named and _interleaved(starts):
        starts = [_joined(starts)]
    made: list[Start] = []
    for start in starts:
        if not made:
            made.append(start)
        elif start.first <= made[-1].first:
            made.append(replace(start, found=_since(start.found, start.began)))
        else:
            made[-1] = _gone_on(made[-1], start)
    return [start.found for start in made if start.epochs]


def _without_mentions(starts: Sequence[Start]) -> list[Start]:
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


def _goes_back(before: Start, start: Start) -> bool:
    """Whether a start's values are of an epoch before the last one, or of the last one again."""
    first, last = start.epochs[0], max(before.epochs, default=-1)
    again = start.found.epochs.get(first, {}).keys() & before.found.epochs.get(first, {}).keys()
    return first < last or (first == last and bool(again))


def _late(before: Start, start: Start) -> bool:
    """Whether a start is no more than late lines of an epoch, none of which came before."""
    (epoch, *others) = start.epochs
    new = start.found.epochs.get(epoch, {}).keys()
    return not others and bool(new) and not new & before.found.epochs.get(epoch, {}).keys()


def _interleaved(starts: Sequence[Start]) -> bool:
    """Whether several writers, who do not name themselves, are at different epochs."""
    found = [start.found for start in starts]
    several = any(len(values) > 1 for one in found for values in one.epochs.values())
    if several and all(map(_is_in_sequence, found)):
        return False
    for one in found:
        counts = [_count(values) for _, values in sorted(one.epochs.items())][:-1]
        if len(set(counts)) > 1:
            return True
    if len(found) < 3 or len({start.first for start in starts}) == 1:
        return False
    total: dict[int, int] = {}
    for one in found:
        for epoch, values in one.epochs.items():
            total[epoch] = total.get(epoch, 0) + _count(values)
    counts = [count for _, count in sorted(total.items())]
    return min(counts[:-1], default=0) > 1 and len(set(counts[:-1])) == 1


def _is_in_sequence(found: Found) -> bool:
    """Whether one writer seems to have written it: each metric once in an epoch, and no epoch is left out. Of several
    epochs the first has several metrics."""
    epochs = sorted(found.epochs)
    once = all(_count(values) == 1 for values in found.epochs.values())
    whole = len(epochs) < 2 or len(found.epochs[epochs[0]]) > 1
    return once and whole and epochs == list(range(epochs[0], epochs[-1] + 1) if epochs else ())


def _count(values: Values) -> int:
    return max(map(len, values.values()), default=0)


def _joined(starts: Sequence[Start]) -> Start:
    """The values of all starts together, as of one with several workers."""
    epochs: dict[int, Values] = {}
    snapshots, elapsed = dict[int, dict[str, float]](), dict[int, float]()
    for start in starts:
        for epoch, values in start.found.epochs.items():
            for key, numbers in values.items():
                epochs.setdefault(epoch, {}).setdefault(key, array("d")).extend(numbers)
        snapshots |= start.found.snapshots
        elapsed |= start.found.elapsed
    notes = tuple(dict.fromkeys(note for start in starts for note in start.found.notes))
    found = replace(starts[0].found, epochs=epochs, snapshots=snapshots, elapsed=elapsed, notes=notes)
    return replace(starts[0], found=found)


def _since(found: Found, began: float | None) -> Found:
    """The same with times since this start."""
    if began is None:
        return found
    return replace(found, elapsed={epoch: round(seconds - began, 6) for epoch, seconds in found.elapsed.items()})


def _gone_on(before: Start, start: Start) -> Start:
    """The run that `start` goes on with. The pause between both is no time of the run."""
    old, new = before.found, _since(start.found, start.began)
    kept = {epoch: values for epoch, values in old.epochs.items() if epoch < start.first}
    snapshots = {epoch: values for epoch, values in old.snapshots.items() if epoch < start.first}
    elapsed = {epoch: seconds for epoch, seconds in old.elapsed.items() if epoch < start.first}
    until = max(elapsed.values(), default=0.0)
    left_out = len(kept) < len(old.epochs) or len(snapshots) < len(old.snapshots)
    note = again("iteration" if old.first is None else "epoch", start.first)
    found = replace(
        old,
        epochs=kept | new.epochs,
        snapshots=snapshots | new.snapshots,
        elapsed=elapsed | {epoch: round(until + seconds, 6) for epoch, seconds in new.elapsed.items()},
        notes=tuple(dict.fromkeys((*old.notes, *new.notes, *([note] if left_out else [])))),
    )
    return replace(before, found=found)


def again(unit: str, first: int) -> str:
    """The note on a start that goes on from an epoch or iteration that the log has already."""
    return (
        f"{unit} {first} comes again, as after a restart: from there on the last start is shown, and what the one "
        "before had is left out"
    )
