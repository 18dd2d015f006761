"""Counts an audit folder: how often each position of each epoch was committed, and whether all files agree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dmltrain.audit import lines, sample_checksum, views_file
from dmltrain.audit.lines import Begun, Committed
from dmltrain.audit.sample_checksum import SampleChecksum
from dmltrain.audit.views_file import JobFacts
from dmltrain.base.arrays import Array
from dmltrain.data.assignment.ranges import ranges

SHOWN = 10  # ranges of positions that a problem names


@dataclass(frozen=True, eq=False)
class Count:
    """times: for each epoch that has a committed round, how often each of its positions was committed, uint16 (n,).
    problems: sentences; empty if each position of these epochs was committed once, and all lines and checksums
    agree."""

    times: Mapping[int, Array]
    problems: tuple[str, ...]


def count(folder: Path) -> Count:
    """Takes two bytes of memory for each sample and epoch. Raises UserError for files that are missing or damaged."""
    recorded = views_file.read(folder / views_file.NAME)
    alone = {view.number for view in recorded.views if not recorded.job.together(view)}
    tally = _Tally(recorded.job, alone)
    for member in recorded.members:
        for line in lines.commits(folder, member):
            tally.commit(member, line)
    for member in recorded.members:
        tally.count(member, lines.samples(folder, member, recorded.job.samples))
    return tally.result()


@dataclass
class _Round:
    """committed: the commit line, as the member `source` wrote it. epoch and checksums: from the sample lines of the
    members that were counted so far."""

    committed: Committed
    source: int
    epoch: int | None = None
    checksums: Array = field(default_factory=lambda: np.zeros(sample_checksum.SIZE))


class _Tally:
    """`alone`: the views in which each member makes steps of its own. In their lines `op`
    is the number of such a step; in the lines of other views it is a round of all members."""

    def __init__(self, job: JobFacts, alone: Collection[int]) -> None:
        self._job, self._alone = job, alone
        self._rounds: dict[tuple[int, ...], _Round] = {}  # key: (op,), or (op, member) for a step of one member
        self._times: dict[int, Array] = {}
        self._problems: list[str] = []

    def commit(self, member: int, line: Committed) -> None:
        known = self._rounds.setdefault(self._key(line, *line.members[:1]), _Round(line, member))
        if known.committed != line:
            self._problems.append(f"op {line.op}: the commit lines of members {known.source} and {member} differ")

    def _key(self, line: Begun | Committed, member: int) -> tuple[int, ...]:
        return (line.op, member) if line.view in self._alone else (line.op,)

    def count(self, member: int, begun: Iterable[Begun]) -> None:
        """Count the samples that this member pushed for committed rounds. `begun`: all of its lines."""
        expected = {key: counted for key, counted in self._rounds.items() if member in counted.committed.members}
        seen: dict[tuple[int, ...], SampleChecksum] = {}
        for line in begun:
            key = self._key(line, member)
            if key not in expected:
                continue  # aborted, or committed without this member
            own = sample_checksum.summed(sample_checksum.of(line.positions))
            if key not in seen:
                self._add(member, line, expected[key])
            elif seen[key] != own:
                self._problems.append(f"op {line.op}: member {member} pushed different samples one after another")
            seen[key] = own
        for op, *_ in sorted(expected.keys() - seen.keys()):
            self._problems.append(f"op {op}: member {member} has no line of its samples")

    def _add(self, member: int, line: Begun, counted: _Round) -> None:
        if counted.epoch not in (None, line.epoch):
            self._problems.append(f"op {line.op}: member {member} is in epoch {line.epoch}, others in {counted.epoch}")
        counted.epoch = line.epoch
        counted.checksums += sample_checksum.of(line.positions)
        times = self._times.setdefault(line.epoch, np.zeros(self._job.samples, np.uint16))
        np.add.at(times, line.positions, 1)

    def result(self) -> Count:
        for (op, *_), counted in sorted(self._rounds.items()):
            self._check_checksum(op, counted)
        for epoch, times in sorted(self._times.items()):
            belongs = np.arange(len(times)) < self._job.samples_in(epoch)
            for positions, problem in (
                ((times == 0) & belongs, "never committed"),
                (times > 1, "committed more than once"),
                ((times > 0) & ~belongs, "committed after the run's last step"),
            ):
                if positions.any():
                    self._problems.append(f"epoch {epoch}: {problem}: {shown(np.flatnonzero(positions))}")
        times_of = {epoch: times[: self._job.samples_in(epoch)] for epoch, times in sorted(self._times.items())}
        return Count(times_of, tuple(self._problems))

    def _check_checksum(self, op: int, counted: _Round) -> None:
        line, expected = counted.committed, sample_checksum.summed(counted.checksums)
        if line.receipt != expected:
            self._problems.append(f"op {op}: its receipt is {line.receipt}, and its members' samples make {expected}")
        if line.committed != line.receipt[0] or line.committed > line.dealt:
            self._problems.append(
                f"op {op}: {line.committed} samples of {line.dealt} are committed, its receipt has {line.receipt[0]}"
            )


def shown(positions: Array, word: str = "position") -> str:
    """For example: 3 position(s): 5-6, 9."""
    runs = ranges(positions)
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in runs[:SHOWN]]
    return f"{len(positions)} {word}(s): {', '.join(texts)}{', ...' if len(runs) > SHOWN else ''}"
