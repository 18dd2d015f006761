"""The lines that each member of an elastic job writes: a JSON object on each line.

    samples-2.jsonl   {"op": 5, "view": 1, "epoch": 0, "positions": [2, 6, 10]}
    commits-2.jsonl   {"op": 5, "view": 2, "members": [0, 2], "dealt": 12, "committed": 6,
                       "receipt": [6, 36, 3573911269]}

A member writes its samples before it pushes their gradient. It writes the line of a committed round when the next op is
complete, because then all members hold the round, or when it enters a view that holds the round. So a round that was
aborted has no such line. The last line of a killed process may be incomplete; such a line does not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from dmltrain.audit import sample_checksum
from dmltrain.base import json_text, schema
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

SAMPLES, COMMITS = "samples-{}.jsonl", "commits-{}.jsonl"  # by member
if TYPE_CHECKING:
    Count = int
    FromOne = int
else:
    # float64, as which many programs read JSON numbers, has all whole numbers up to this exactly
    Count, FromOne = schema.whole(0, (1 << 53) - 1), schema.whole(1, (1 << 53) - 1)


@dataclass(frozen=True)
class _Samples:
    """A line of samples-MEMBER.jsonl; see Begun."""

    op: FromOne
    view: FromOne
    epoch: Count
    positions: tuple[Count, ...]


@dataclass(frozen=True, eq=False)
class Begun:
    """A member's part of round `op`: positions in `epoch`, int64 (n,). `view`: where the member first pushes them."""

    op: int
    view: int
    epoch: int
    positions: Array


@dataclass(frozen=True)
class Committed:
    """Round `op` was completed in `view`, by these members: `committed` of its `dealt` samples are in the sum."""

    op: FromOne
    view: FromOne
    members: tuple[Count, ...]
    dealt: Count
    committed: Count
    receipt: tuple[Count, Count, Count]  # a SampleChecksum


class Writer:
    """Writes the lines of one member. The operating system has a line when the call returns: kill -9 does not lose it.

    The files of an earlier job for this member are emptied, unless this worker `continues` them: it is a replacement,
    or it joins with a rank of its own, whose files worker 0 has emptied (`clear`). UserError: a file cannot be written.
    """

    def __init__(self, folder: Path, member: int, continues: bool = False) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._samples, self._commits = (
                _opened(folder / name.format(member), continues) for name in (SAMPLES, COMMITS)
            )
        except OSError as error:
            raise UserError(f"--audit {folder}: {error}; give a folder that can be written") from error
        self._waiting: Committed | None = None  # this member holds it; the others may not yet

    def began(self, op: int, view: int, epoch: int, positions: Array) -> None:
        """Call it before the first push of a round."""
        _append(self._samples, _Samples(op, view, epoch, positions.tolist()))

    def committed(
        self, op: int, view: int, members: Sequence[int], dealt: int, committed: int, checksum_sum: Array
    ) -> None:
        """This member holds the round; `checksum_sum`: that of all members' sample checksums, float64 (3,)."""
        self.settled(op - 1)
        self._waiting = Committed(op, view, tuple(members), dealt, committed, sample_checksum.summed(checksum_sum))

    def committed_alone(self, number: int, view: int, member: int, own: Array) -> None:
        """The servers have this step of a member, which it has made alone; `own`: the checksum of its samples."""
        count = int(own[0])
        _append(self._commits, Committed(number, view, (member,), count, count, sample_checksum.summed(own)))

    def settled(self, op: int) -> None:
        """All members hold `op`: it is the base of a view, or this member holds a later op, or leaves with this one."""
        if self._waiting and self._waiting.op <= op:
            _append(self._commits, self._waiting)
            self._waiting = None

    def close(self) -> None:
        """A round that is not settled stays without a line."""
        self._samples.close()
        self._commits.close()


def clear(folder: Path, workers: int) -> None:
    """Empty the files of an earlier job for ranks from `workers` on: a worker that joins with such a rank continues its
    files. UserError: a file cannot be written."""
    try:
        for name in (SAMPLES, COMMITS):
            for path in folder.glob(name.format("*")):
                rank = path.stem.rpartition("-")[2]
                if rank.isdecimal() and int(rank) >= workers:
                    os.truncate(path, 0)
    except OSError as error:
        raise UserError(f"--audit {folder}: {error}; give a folder that can be written") from error


def _opened(path: Path, continues: bool) -> BinaryIO:
    """The file, open for appending. With `continues` an incomplete last line is cut off; else the file is emptied."""
    if not continues:
        return path.open("wb", buffering=0)
    file = path.open("ab+", buffering=0)
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    return file


def _append(file: BinaryIO, line: _Samples | Committed) -> None:
    rest = memoryview(json_text.encode(line) + b"\n")
    try:
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
    except OSError as error:
        raise UserError(f"--audit: {file.name}: {error.strerror}; make room there, or train without --audit") from error


def samples(folder: Path, member: int, size: int) -> Iterator[Begun]:
    """The lines of samples-MEMBER.jsonl; `size`: of an epoch. Raises UserError for a damaged or unreadable file."""
    for where, content in _lines(folder / SAMPLES.format(member)):
        try:
            yield parse_samples(content, size)
        except ValueError as error:
            raise UserError(f"{where}: {error}: the file is damaged") from None


def commits(folder: Path, member: int) -> Iterator[Committed]:
    """The lines of commits-MEMBER.jsonl. Raises UserError for a damaged or unreadable file."""
    for where, content in _lines(folder / COMMITS.format(member)):
        try:
            yield parse_commits(content)
        except ValueError as error:
            raise UserError(f"{where}: {error}: the file is damaged") from None


def parse_samples(content: bytes, size: int) -> Begun:
    """Raises ValueError."""
    line = schema.read(_Samples, json_text.parse(content))
    positions = np.array(line.positions, np.int64)
    for place in np.flatnonzero(positions >= size):
        raise ValueError(f"positions[{place}] is {positions[place]}, expected a whole number from 0 to {size - 1}")
    return Begun(line.op, line.view, line.epoch, positions)


def parse_commits(content: bytes) -> Committed:
    """Raises ValueError."""
    return schema.read(Committed, json_text.parse(content))


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(path and number, content) of each line that is finished."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; a folder that a job wrote with --audit was expected, with the files of all "
            "members from all hosts"
        ) from error
