"""Sums of tensors of all workers of one host, in the memory that they share (host_memory.py), without a server.

A tensor travels in pieces, in three stages that overlap: each worker posts its values, reduces its own part of all
workers' values, and takes the others' parts. A small piece is reduced whole by each worker. Values are added in the
order of ranks, as servers do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dmltrain.backends.torch.process_group.host_memory import (
    POSTED,
    REDUCED,
    SLOT_BYTES,
    SLOTS,
    TAKEN,
    HostMemory,
)
from dmltrain.base.arrays import Array
from dmltrain.base.errors import JobLost

WHOLE_BYTES = 1 << 14  # of a piece that each worker reduces alone
BLOCK = 16  # elements: parts begin at a cache line


@dataclass(frozen=True)
class Sum:
    """Of all workers' `values` (elements,), times `factor`, in their place; then `end` is called, with an error or
    None."""

    values: Array
    factor: float
    end: Callable[[Exception | None], None]

    @property
    def note(self) -> int:
        """What must be the same on all workers."""
        return self.values.nbytes * 16 + self.values.itemsize


@dataclass(frozen=True)
class Piece:
    """The piece of this number, counted from 0; `last` of its sum."""

    number: int
    whole: Sum
    values: Array
    last: bool

    def part(self, worker: int, count: int) -> slice:
        """What this one of `count` workers reduces."""
        size = -(-len(self.values) // (count * BLOCK)) * BLOCK
        return slice(min(worker * size, len(self.values)), min((worker + 1) * size, len(self.values)))

    @property
    def small(self) -> bool:
        return self.values.nbytes <= WHOLE_BYTES


class HostSums:
    """A thread of this object makes the sums, one after another."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._sums: queue.SimpleQueue[Sum] = queue.SimpleQueue()
        self._made = 0  # pieces so far
        threading.Thread(target=self._run, name="dmltrain host sums", daemon=True).start()

    def start(self, sum_: Sum) -> None:
        """All workers must start the same sums in the same order."""
        self._sums.put(sum_)

    def _run(self) -> None:
        """At most one piece is in each stage."""
        posted = reduced = None
        pieces: Iterator[Piece] = iter(())
        while True:
            piece = next(pieces, None)
            if piece is None and (sum_ := self._next(wait=not (posted or reduced))):
                pieces = self._pieces(sum_)
                piece = next(pieces)
            try:
                if piece:
                    self._post(piece)
                if posted:
                    self._reduce(posted)
                if reduced:
                    self._take(reduced)
            except Exception as error:  # JobLost: all that is under way has failed
                return self._fail(error, posted, reduced, piece)
            posted, reduced = piece, posted

    def _next(self, wait: bool) -> Sum | None:
        try:
            return self._sums.get(block=wait)
        except queue.Empty:
            return None

    def _pieces(self, sum_: Sum) -> Iterator[Piece]:
        size = SLOT_BYTES // sum_.values.itemsize
        for begin in range(0, len(sum_.values), size):
            last = begin + size >= len(sum_.values)
            yield Piece(self._made, sum_, sum_.values[begin : begin + size], last)
            self._made += 1

    def _post(self, piece: Piece) -> None:
        """Let the others read this worker's values."""
        memory, values = self._memory, piece.values
        memory.wait(TAKEN, piece.number + 1 - SLOTS)
        slot, own = memory.slot(memory.rank, piece.number, values.dtype), piece.part(memory.rank, memory.count)
        if piece.small:
            slot[: len(values)] = values
        else:
            slot[: own.start] = values[: own.start]
            slot[own.stop : len(values)] = values[own.stop :]
        memory.notes[memory.rank, piece.number % SLOTS] = piece.whole.note
        memory.advance(POSTED, piece.number + 1)

    def _reduce(self, piece: Piece) -> None:
        """Add all workers' values of a part; the result lies where this worker's own values of it would."""
        memory, values = self._memory, piece.values
        memory.wait(POSTED, piece.number + 1)
        self._check(piece)
        part = slice(len(values)) if piece.small else piece.part(memory.rank, memory.count)
        slots = [memory.slot(worker, piece.number, values.dtype)[part] for worker in range(memory.count)]
        total = values[part]
        if not piece.small:
            total, slots[memory.rank] = slots[memory.rank], total
        np.add(slots[0], slots[1], out=total)
        for more in slots[2:]:
            np.add(total, more, out=total)
        if piece.whole.factor != 1.0:
            np.multiply(total, piece.whole.factor, out=total)
        memory.advance(REDUCED, piece.number + 1)
        if not piece.small:
            values[part] = total

    def _check(self, piece: Piece) -> None:
        if any(self._memory.notes[:, piece.number % SLOTS] != piece.whole.note):
            raise JobLost("the workers have called all_reduce with tensors of different sizes")

    def _take(self, piece: Piece) -> None:
        """The parts that the others have reduced."""
        memory, values = self._memory, piece.values
        if not piece.small:
            memory.wait(REDUCED, piece.number + 1)
            for worker in range(memory.count):
                part = piece.part(worker, memory.count)
                if worker != memory.rank:
                    values[part] = memory.slot(worker, piece.number, values.dtype)[part]
        memory.advance(TAKEN, piece.number + 1)
        if piece.last:
            piece.whole.end(None)

    def _fail(self, error: Exception, *under_way: Piece | None) -> None:
        """End all sums with this error, also those that are still to come."""
        failed = {id(piece.whole): piece.whole for piece in under_way if piece}
        for sum_ in failed.values():
            sum_.end(error)
        while True:
            self._sums.get().end(error)
