"""Counts the draws of any training loop (draws.py): was each sample used once in each epoch?

What a start has drawn after the place where the next start went on does not count: the weights went back to a
checkpoint of that place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dmltrain.audit import draws, lines
from dmltrain.audit.count import shown
from dmltrain.audit.draws import Facts
from dmltrain.base.arrays import Array


@dataclass
class _Epoch:
    """times: for each start, how often each sample was used, uint16 (n,). batch: the largest one. ended: the ranks that
    came to its end."""

    times: dict[int, Array] = field(default_factory=dict)
    batch: int = 1
    ended: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Counted:
    """Sentences; `problems` are samples that were lost or repeated."""

    rows: tuple[str, ...]
    problems: tuple[str, ...]


def count(folder: Path) -> Counted:
    """Raises UserError for files that are missing or damaged."""
    facts = draws.read(folder)
    epochs: dict[int, _Epoch] = {}
    again: list[str] = []
    for rank in range(facts.workers):
        counts, notes = _counting(folder, rank, facts)
        again += [note for note in notes if note not in again]
        for number, line in enumerate(lines.samples(folder, rank, facts.samples)):
            if number in counts:
                _add(epochs.setdefault(line.epoch, _Epoch()), rank, line, facts)
    judged = [_judged(number, epochs[number], facts, number == max(epochs)) for number in sorted(epochs)]
    rows = [row for row, problem in judged if not problem]
    return Counted((*again, *rows), tuple(row for row, problem in judged if problem))


def _counting(folder: Path, rank: int, facts: Facts) -> tuple[set[int], list[str]]:
    """The numbers of the lines that count, and a sentence for each start that went on from a checkpoint."""
    newest: dict[tuple[int, int], int] = {}
    notes, start = [], 1
    for number, line in enumerate(lines.samples(folder, rank, facts.samples)):
        if line.view != start:
            start = line.view
            for place in [place for place in newest if place >= (line.epoch, line.op)]:
                del newest[place]
            notes.append(f"start {start} went on in epoch {line.epoch} with batch {line.op}")
        newest[line.epoch, line.op] = number
    return set(newest.values()), notes


def _add(epoch: _Epoch, rank: int, line: lines.Begun, facts: Facts) -> None:
    times = epoch.times.setdefault(line.view, np.zeros(facts.samples, np.uint16))
    np.add.at(times, line.positions, 1)
    epoch.batch = max(epoch.batch, len(line.positions))
    if not len(line.positions):
        epoch.ended.add(rank)


def _judged(number: int, epoch: _Epoch, facts: Facts, is_last: bool) -> tuple[str, bool]:
    """A sentence about the epoch, and whether it is a problem."""
    times = sum(epoch.times.values(), np.zeros(facts.samples, np.uint16))
    lost, repeated = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    extra = int((times[repeated] - 1).sum())
    used = facts.samples - len(lost)
    ragged = facts.workers * epoch.batch  # fewer are padded or left out, so that all workers have equally many batches
    begins = f"epoch {number}: {used} of {facts.samples} samples used"
    if is_last and len(epoch.ended) < facts.workers:
        begins, lost = f"{begins}, and not all workers came to its end", lost[:0]
    if not len(lost) and extra < ragged:
        return f"{begins}, each once{f', but for {extra} that pad the last batches' if extra else ''}", False
    if facts.drop_last and not extra and len(lost) < ragged:
        return f"{begins}, each once; {len(lost)} left out at its end (drop_last)", False
    where = " after a start went on" if len(epoch.times) > 1 else ""
    parts = [f"{shown(lost, 'sample')} lost"] if len(lost) else []
    parts += [f"{shown(repeated, 'sample')} repeated{where}"] if len(repeated) else []
    return f"{begins}; " + "; ".join(parts), True
