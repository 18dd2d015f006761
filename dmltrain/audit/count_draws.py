"""Counts the draws of any training loop (draws.py): was each sample used once in each epoch?

What a start has drawn after the place where the next start went on does not count: the weights went back to a
checkpoint of that place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dmltrain.audit import draws, lines
from dmltrain.audit.count import shown
from dmltrain.audit.draws import Facts
from dmltrain.base.arrays import Array

Place = tuple[int, int]  # epoch, and the number of the batch in it


@dataclass
class _Start:
    """batch: the sampler's, or the largest one. first: where each rank began."""

    workers: int
    batch: int
    first: dict[int, Place] = field(default_factory=dict)

    def samples_before(self, place: Place) -> Place:
        """The epoch, and how many of its samples all workers had used."""
        return place[0], (place[1] - 1) * self.workers * self.batch

    def has_replaced(self, place: Place, rank: int, of: _Start) -> bool:
        """Whether what start `of` drew at this place was drawn again from the checkpoint with which this start began.
        Batches of other numbers of workers are compared by the samples before them."""
        first = self.first.get(rank, min(self.first.values()))
        if self.workers == of.workers:
            return place >= first
        return of.samples_before(place) >= self.samples_before(first)


@dataclass
class _Epoch:
    """times: for each start, how often each sample was used, uint16 (n,). ragged: fewer samples than these are padded
    or left out, so that all workers have equally many batches. ended: the ranks that came to its end."""

    times: dict[int, Array] = field(default_factory=dict)
    ragged: int = 1
    ended: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Counted:
    """Sentences; `problems` are samples that were lost or repeated."""

    rows: tuple[str, ...]
    problems: tuple[str, ...]


def count(folder: Path) -> Counted:
    """Raises UserError for files that are missing or damaged."""
    facts = draws.read(folder)
    starts = _starts(folder, facts)
    epochs: dict[int, _Epoch] = {}
    for rank, number, line in _lines(folder, facts):
        later = [starts[other] for other in starts if other > number]
        if not any(start.has_replaced((line.epoch, line.op), rank, starts[number]) for start in later):
            _add(epochs.setdefault(line.epoch, _Epoch()), rank, number, line, starts[number], facts.samples)
    judged = [_judged(number, epochs[number], facts, starts, number == max(epochs)) for number in sorted(epochs)]
    rows = [row for row, problem in judged if not problem]
    return Counted((*_went_on(starts), *rows), tuple(row for row, problem in judged if problem))


def _lines(folder: Path, facts: Facts) -> Iterator[tuple[int, int, lines.Begun]]:
    """The rank, the number of the start and the line. A rank counts the starts in which it took part."""
    for rank in range(max([facts.workers, *(workers for workers, _ in facts.starts)])):
        own = [number for number, (workers, _) in enumerate(facts.starts, 1) if workers > rank]
        for line in lines.samples(folder, rank, facts.samples):
            yield rank, own[line.view - 1] if line.view <= len(own) else line.view, line


def _starts(folder: Path, facts: Facts) -> dict[int, _Start]:
    found: dict[int, _Start] = {}
    for rank, number, line in _lines(folder, facts):
        known = facts.starts[number - 1] if number <= len(facts.starts) else (facts.workers, 0)
        start = found.setdefault(number, _Start(*known))
        start.batch = max(start.batch, len(line.positions))
        start.first.setdefault(rank, (line.epoch, line.op))
    return found


def _went_on(starts: dict[int, _Start]) -> Iterator[str]:
    """A sentence for each start that went on from a checkpoint."""
    for number in sorted(starts)[1:]:
        for epoch, batch in dict.fromkeys(starts[number].first.values()):
            yield f"start {number} went on in epoch {epoch} with batch {batch}"


def _add(epoch: _Epoch, rank: int, number: int, line: lines.Begun, start: _Start, samples: int) -> None:
    times = epoch.times.setdefault(number, np.zeros(samples, np.uint16))
    np.add.at(times, line.positions, 1)
    epoch.ragged = max(epoch.ragged, start.workers * len(line.positions))
    if not len(line.positions):
        epoch.ended.add(rank)


def _judged(number: int, epoch: _Epoch, facts: Facts, starts: dict[int, _Start], is_last: bool) -> tuple[str, bool]:
    """A sentence about the epoch, and whether it is a problem."""
    times = sum(epoch.times.values(), np.zeros(facts.samples, np.uint16))
    lost, repeated = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    extra = int((times[repeated] - 1).sum())
    used = facts.samples - len(lost)
    begins = f"epoch {number}: {used} of {facts.samples} samples used"
    if is_last and len(epoch.ended) < starts[max(epoch.times)].workers:
        begins, lost = f"{begins}, and not all workers came to its end", lost[:0]
    if not len(lost) and extra < epoch.ragged:
        return f"{begins}, each once{f', but for {extra} that pad the last batches' if extra else ''}", False
    if facts.drop_last and not extra and len(lost) < epoch.ragged:
        return f"{begins}, each once; {len(lost)} left out at its end (drop_last)", False
    where = " after a start went on" if len(epoch.times) > 1 else ""
    parts = [f"{shown(lost, 'sample')} lost"] if len(lost) else []
    parts += [f"{shown(repeated, 'sample')} repeated{where}"] if len(repeated) else []
    return f"{begins}; " + "; ".join(parts), True
