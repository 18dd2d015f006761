"""Tells starts apart in a log whose epochs do not go back: a program was started again in the epoch where it ended.

Then this epoch has more values than the others. Several workers whose lines do not name them also write several values.
But they do so in each epoch, and mostly by turns: the second value of one metric is before the first one of another.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from dmltrain.report.dialect.attempts import LogSection, restart_note
from dmltrain.report.runs.run import Values

Seen = Mapping[tuple[int, int], int]  # epoch and number of values -> metrics known when the first one had more values

_FEW = 3  # epochs; with more of them, it is improbable that each was interrupted and started again
_DOUBT = "epoch {} has several values of {}: read as those of several workers, but they may be of several starts"


def starts(start: LogSection, workers: int, seen: Seen) -> list[LogSection]:
    """The starts in a section that seems to have one. workers: how many the lines name; 0 if they name none."""
    epochs = start.values.epochs
    if not seen:  # no value is there twice
        return [start]
    usual = _usual(epochs, workers)
    begun = [epoch for epoch in sorted(epochs) if _is_again(epoch, start, usual, workers, seen)]
    if len(epochs) > 1 and 2 * len(begun) > len(epochs):
        return [start]
    if not begun:
        return [start if workers else _doubted(start, seen)]
    sections = [start]
    for epoch in begun:
        sections[-1:] = _begun_at(epoch, sections[-1], usual, seen)
    most = max(usual, key=usual.__getitem__)
    unclear = not workers and usual[most] > min(usual.values())  # several workers would write each value
    return [_with(section, _DOUBT.format(begun[0], most)) for section in sections] if unclear else sections


def _begun_at(epoch: int, start: LogSection, usual: Mapping[str, int], seen: Seen) -> list[LogSection]:
    """The starts that trained this epoch. Of their last batches, only the values of the last start's are known."""
    batch = start.values.snapshots.get(epoch, {}).keys()
    first, last = _cut(start, epoch, usual, seen)
    between = list[LogSection]()
    while any(len(numbers) > usual[key] for key, numbers in first.values.epochs[epoch].items()):
        first, middle = _cut(first, epoch, usual, seen)
        between.insert(0, middle)
    known = [section for section in (first, *between) if not batch - section.values.epochs[epoch].keys()]
    if len(known) <= len(between):
        last = replace(last, values=replace(last.values, notes=(*last.values.notes, restart_note("epoch", epoch))))
    if first not in known:
        del first.values.epochs[epoch]
        known.insert(0, first)
    return [*known, last]


def _usual(epochs: Mapping[int, Values], workers: int) -> dict[str, int]:
    """How many values of each metric an epoch has."""
    counts: dict[str, Counter[int]] = {}
    for values in epochs.values():
        for key, numbers in values.items():
            counts.setdefault(key, Counter())[len(numbers)] += 1
    if len(epochs) == 1:
        most = max(len(numbers) for values in epochs.values() for numbers in values.values())
        starts = max(1, most // (workers or 1))
        return {key: max(1, len(numbers) // starts) for values in epochs.values() for key, numbers in values.items()}
    of_all = workers or _commonest(Counter(max(map(len, values.values())) for values in epochs.values()))
    return {key: min(_commonest(count), of_all) for key, count in counts.items()}


def _commonest(counts: Counter[int]) -> int:
    """The most frequent number; the smallest if several are."""
    return min(number for number in counts if counts[number] == max(counts.values()))


def _is_again(epoch: int, start: LogSection, usual: Mapping[str, int], workers: int, seen: Seen) -> bool:
    values = start.values.epochs[epoch]
    more = [key for key, numbers in values.items() if len(numbers) > (workers or usual[key])]
    if not more or workers:
        return bool(more)
    if len({len(numbers) for numbers in values.values()}) > 1:
        return True
    by_turns = seen.get((epoch, usual[more[0]]), 0) < len(values)
    return not by_turns and (len(values) > 1 or len(start.values.epochs) > 2)


def _doubted(start: LogSection, seen: Seen) -> LogSection:
    """The section, with a note if it has few epochs and they do not show that several workers wrote by turns."""
    epochs = start.values.epochs
    if len(epochs) > _FEW or any(seen.get((epoch, 1), len(values)) < len(values) for epoch, values in epochs.items()):
        return start
    epoch = min(epoch for epoch, values in epochs.items() if max(map(len, values.values())) > 1)
    return _with(start, _DOUBT.format(epoch, next(key for key, numbers in epochs[epoch].items() if len(numbers) > 1)))


def _with(start: LogSection, note: str) -> LogSection:
    return replace(start, values=replace(start.values, notes=(*start.values.notes, note)))


def _cut(start: LogSection, epoch: int, usual: Mapping[str, int], seen: Seen) -> list[LogSection]:
    """The section in two: until the last start in `epoch`, and from it on."""
    values_of_start = start.values
    earlier, last = dict[str, "array[float]"](), dict[str, "array[float]"]()
    known, most = 0, max(map(len, values_of_start.epochs[epoch].values()))
    for key, numbers in values_of_start.epochs[epoch].items():
        count = usual[key]
        if len(numbers) > count:
            known = known or seen.get((epoch, most - count), 0)
            earlier[key], last[key] = numbers[:-count], numbers[-count:]
    for place, (key, numbers) in enumerate(values_of_start.epochs[epoch].items()):
        if len(numbers) <= usual[key]:
            (earlier if place < known else last)[key] = numbers
    at = values_of_start.elapsed.get(epoch)
    began = None if at is None else at - (last["seconds"][0] if "seconds" in last else 0.0)
    before = {number: values for number, values in values_of_start.epochs.items() if number < epoch}
    after = {number: values for number, values in values_of_start.epochs.items() if number > epoch}
    first = replace(
        values_of_start,
        epochs={**before, epoch: earlier},
        snapshots={number: values for number, values in values_of_start.snapshots.items() if number < epoch},
        elapsed={number: seconds for number, seconds in values_of_start.elapsed.items() if number < epoch},
    )
    second = replace(
        values_of_start,
        epochs={epoch: last, **after},
        snapshots={number: values for number, values in values_of_start.snapshots.items() if number >= epoch},
        elapsed={number: seconds for number, seconds in values_of_start.elapsed.items() if number >= epoch},
    )
    return [replace(start, values=first), LogSection(epoch, second, began, spoken=False)]
