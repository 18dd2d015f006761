"""Collectives of all workers of one host, in the memory that they share (host_memory.py), without a server.

A tensor travels in pieces, in three stages that overlap: each worker posts values, reduces or takes what it needs of
all workers' values, and takes what the others have reduced. Values are added in the order of ranks, as servers do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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

End = Callable[[Exception | None], None]
WHOLE_BYTES = 1 << 14  # of a piece of a sum that each worker reduces alone
BLOCK = 16  # elements: parts begin at a cache line
CAUSE_SECONDS = 10.0  # for those who compare calls to find which ones differ


@dataclass(frozen=True)
class Place:
    """Of a piece: its `number`, counted from 0, and its `index` in its operation."""

    memory: HostMemory
    number: int
    index: int

    def slot(self, worker: int, dtype: np.dtype[Any]) -> Array:
        return self.memory.slot(worker, self.number, dtype)


@dataclass(frozen=True)
class Operation:
    """What a worker gives and gets. `end` is called when it is over, with an error or None."""

    end: End
    number: ClassVar[int]  # of the kind
    reduces: ClassVar[bool] = False  # whether workers take what others have reduced

    @property
    def size(self) -> tuple[int, int]:
        """Bytes, and those of an element, which must be the same on all workers."""
        raise NotImplementedError

    @property
    def note(self) -> int:
        bytes_, element = self.size
        return bytes_ << 8 | element << 3 | self.number

    def pieces(self, workers: int) -> int:
        raise NotImplementedError

    def posters(self, workers: int) -> Sequence[int]:
        """The workers whose values are needed."""
        return range(workers)

    def post(self, place: Place) -> None:
        """Let the others read this worker's values."""

    def reduce(self, place: Place) -> None:
        """When all posters have posted."""

    def take(self, place: Place) -> None:
        """When all have reduced, if `reduces`."""


@dataclass(frozen=True)
class Sum(Operation):
    """Of all workers' `values` (elements,), times `factor`, in their place."""

    values: Array
    factor: float = 1.0
    number = 0

    @property
    def size(self) -> tuple[int, int]:
        return self.values.nbytes, self.values.itemsize

    @property
    def reduces(self) -> bool:  # type: ignore[override]
        return self.values.nbytes > WHOLE_BYTES

    def pieces(self, workers: int) -> int:
        return _pieces(len(self.values), SLOT_BYTES // self.values.itemsize)

    def _of(self, place: Place) -> tuple[Array, bool]:
        """The values of a piece, and whether each worker reduces all of them."""
        values = _piece(self.values, SLOT_BYTES // self.values.itemsize, place.index)
        return values, values.nbytes <= WHOLE_BYTES

    def post(self, place: Place) -> None:
        values, small = self._of(place)
        rank, slot = place.memory.rank, place.slot(place.memory.rank, values.dtype)
        own = slice(len(values), len(values)) if small else _part(len(values), rank, place.memory.count)
        slot[: own.start] = values[: own.start]
        slot[own.stop : len(values)] = values[own.stop :]

    def reduce(self, place: Place) -> None:
        """Add all workers' values of a part; the result lies where this worker's own values of it would."""
        values, small = self._of(place)
        memory = place.memory
        part = slice(len(values)) if small else _part(len(values), memory.rank, memory.count)
        slots = [place.slot(worker, values.dtype)[part] for worker in range(memory.count)]
        if small:
            return _add(slots, values[part], self.factor)
        total, slots[memory.rank] = slots[memory.rank], values[part]
        _add(slots, total, self.factor)
        values[part] = total

    def take(self, place: Place) -> None:
        values, small = self._of(place)
        memory = place.memory
        for worker in range(memory.count) if not small else ():
            part = _part(len(values), worker, memory.count)
            if worker != memory.rank:
                values[part] = place.slot(worker, values.dtype)[part]


@dataclass(frozen=True)
class Broadcast(Operation):
    """Of the `values` (bytes,) of worker `root`, into the others'."""

    values: Array
    root: int
    number = 1

    @property
    def size(self) -> tuple[int, int]:
        return self.values.nbytes, self.root % 32

    def pieces(self, workers: int) -> int:
        return _pieces(len(self.values), SLOT_BYTES)

    def posters(self, workers: int) -> Sequence[int]:
        return (self.root,)

    def post(self, place: Place) -> None:
        if place.memory.rank == self.root:
            values = _piece(self.values, SLOT_BYTES, place.index)
            place.slot(self.root, values.dtype)[: len(values)] = values

    def reduce(self, place: Place) -> None:
        if place.memory.rank != self.root:
            values = _piece(self.values, SLOT_BYTES, place.index)
            values[:] = place.slot(self.root, values.dtype)[: len(values)]


@dataclass(frozen=True)
class Gather(Operation):
    """All workers' `own` (bytes,), each into one of `parts`."""

    own: Array
    parts: Sequence[Array]
    number = 2

    @property
    def size(self) -> tuple[int, int]:
        return self.own.nbytes, 1

    def pieces(self, workers: int) -> int:
        return _pieces(len(self.own), SLOT_BYTES)

    def post(self, place: Place) -> None:
        values = _piece(self.own, SLOT_BYTES, place.index)
        place.slot(place.memory.rank, values.dtype)[: len(values)] = values

    def reduce(self, place: Place) -> None:
        for worker, part in enumerate(self.parts):
            values = _piece(part, SLOT_BYTES, place.index)
            values[:] = place.slot(worker, values.dtype)[: len(values)]


@dataclass(frozen=True)
class ScatteredSum(Operation):
    """Into `own` (elements,) the sum, times `factor`, of the part with this worker's number in all workers' `parts`."""

    own: Array
    parts: Sequence[Array]
    factor: float = 1.0
    number = 3

    @property
    def size(self) -> tuple[int, int]:
        return self.own.nbytes, self.own.itemsize

    def _length(self, workers: int) -> int:
        return SLOT_BYTES // self.own.itemsize // workers // BLOCK * BLOCK

    def pieces(self, workers: int) -> int:
        return _pieces(len(self.own), self._length(workers))

    def post(self, place: Place) -> None:
        length, rank = self._length(len(self.parts)), place.memory.rank
        slot = place.slot(rank, self.own.dtype)
        for worker, part in enumerate(self.parts):
            values = _piece(part, length, place.index)
            slot[worker * length : worker * length + len(values)] = values

    def reduce(self, place: Place) -> None:
        memory, length = place.memory, self._length(len(self.parts))
        own = _piece(self.own, length, place.index)
        part = slice(memory.rank * length, memory.rank * length + len(own))
        _add([place.slot(worker, own.dtype)[part] for worker in range(memory.count)], own, self.factor)


class HostCollectives:
    """A thread of this object makes them, one after another."""

    def __init__(self, memory: HostMemory, cause_seconds: float = CAUSE_SECONDS) -> None:
        self._memory, self._cause_seconds = memory, cause_seconds
        self._asked: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        self._made = 0  # pieces so far
        threading.Thread(target=self._run, name="dmltrain host", daemon=True).start()

    def start(self, operation: Operation) -> None:
        """All workers must start the same ones in the same order."""
        self._asked.put(operation)

    def _run(self) -> None:
        """At most one piece is in each stage."""
        posted = reduced = None
        pieces: Iterator[tuple[Operation, Place]] = iter(())
        while True:
            piece = next(pieces, None)
            if piece is None and (asked := self._next(wait=not (posted or reduced))):
                pieces = self._pieces(asked)
                piece = next(pieces)
            try:
                if piece:
                    self._post(*piece)
                if posted:
                    self._reduce(*posted)
                if reduced:
                    self._take(*reduced)
            except Exception as error:  # JobLost: all that is under way has failed
                return self._fail(error, posted, reduced, piece)
            posted, reduced = piece, posted

    def _next(self, wait: bool) -> Operation | None:
        try:
            return self._asked.get(block=wait)
        except queue.Empty:
            return None

    def _pieces(self, operation: Operation) -> Iterator[tuple[Operation, Place]]:
        for index in range(operation.pieces(self._memory.count)):
            yield operation, Place(self._memory, self._made, index)
            self._made += 1

    def _post(self, operation: Operation, place: Place) -> None:
        memory = self._memory
        memory.wait(TAKEN, place.number + 1 - SLOTS)
        operation.post(place)
        memory.notes[memory.rank, place.number % SLOTS] = operation.note
        memory.advance(POSTED, place.number + 1)

    def _reduce(self, operation: Operation, place: Place) -> None:
        posters = operation.posters(self._memory.count)
        self._memory.wait(POSTED, place.number + 1, posters)
        self._check(operation, place, posters)
        operation.reduce(place)
        self._memory.advance(REDUCED, place.number + 1)

    def _check(self, operation: Operation, place: Place, posters: Sequence[int]) -> None:
        notes = self._memory.notes[:, place.number % SLOTS]
        if any(notes[worker] != operation.note for worker in posters):
            self._memory.wait_for_cause(self._cause_seconds)
            raise JobLost("the workers have made different calls of torch.distributed, or with tensors of other sizes")

    def _take(self, operation: Operation, place: Place) -> None:
        if operation.reduces:
            self._memory.wait(REDUCED, place.number + 1)
            operation.take(place)
        self._memory.advance(TAKEN, place.number + 1)
        if place.index + 1 == operation.pieces(self._memory.count):
            operation.end(None)

    def _fail(self, error: Exception, *under_way: tuple[Operation, Place] | None) -> None:
        """End all operations with this error, also those that are still to come."""
        failed = {id(piece[0]): piece[0] for piece in under_way if piece}
        for operation in failed.values():
            operation.end(error)
        while True:
            self._asked.get().end(error)


def _pieces(elements: int, length: int) -> int:
    return max(1, -(-elements // length))


def _piece(values: Array, length: int, index: int) -> Array:
    return values[index * length : (index + 1) * length]


def _part(elements: int, worker: int, count: int) -> slice:
    """What this one of `count` workers reduces."""
    size = -(-elements // (count * BLOCK)) * BLOCK
    return slice(min(worker * size, elements), min((worker + 1) * size, elements))


def _add(values: Sequence[Array], total: Array, factor: float) -> None:
    np.add(values[0], values[1], out=total)
    for more in values[2:]:
        np.add(total, more, out=total)
    if factor != 1.0:
        np.multiply(total, factor, out=total)
