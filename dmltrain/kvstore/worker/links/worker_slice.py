"""A slice on a worker, where its values go, and what a link has carried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.encoded import AsSent, Encoding, Residual
from dmltrain.kvstore.transport import flat, wire
from dmltrain.kvstore.transport.shared_memory import ALIGNMENT, Arena
from dmltrain.kvstore.worker.links.sharding import Slice
from dmltrain.kvstore.worker.links.undo import HostResidual, Undo

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec

Parts = Sequence[Array]  # the keys of a flat key: flat arrays that lie anywhere
_ZEROS = memoryview(bytes(ALIGNMENT))  # between two keys

FIRST = 1 << 30  # the highest priority of a frame
CLOCK_BITS = 48  # of a moment


@dataclass(eq=False)
class WorkerSlice:
    """One slice of a key on a worker."""

    range: Slice
    dtype: np.dtype[Any]
    codec: Codec | None  # of pushes
    result_codec: Codec | None  # of pulled values
    sending: Array | None = None  # pushes are copied or encoded into it, uint8
    receiving: Array | None = None  # receives encoded values, uint8
    residual: Residual | None = None  # of the encoded pushes; not the store's own if the caller encodes them
    undo: Undo | None = None  # of the residual, in an elastic job
    loaned: int = 0  # the last moment whose push lies in `sending` in shared memory, where the server reads it
    returned: int = 0  # the last moment whose value has arrived: the server has finished reading `sending`
    nbytes: int = field(init=False)
    value_type: int = field(init=False)  # element type in headers of values that are not encoded
    push_bytes: int = field(init=False)
    push_type: int = field(init=False)

    def __post_init__(self) -> None:
        length = self.range.length
        self.nbytes, self.value_type = length * self.dtype.itemsize, wire.DTYPES.index(self.dtype.name)
        self.push_bytes = self.codec.nbytes(length) if self.codec else self.nbytes
        self.push_type = self.codec.number if self.codec else self.value_type
        if self.codec and self.codec.needs_residual:
            self.residual = HostResidual(np.zeros(length, np.float32))

    def encoding(self, arena: Arena | None, op: Callable[[], int]) -> Encoding:
        """For a caller that encodes the pushes from now on. `arena`: shared with the server, if there is one. `op`: the
        one of an elastic job whose push comes next."""
        assert self.codec is not None
        taken = arena.take(self.push_bytes) if arena else None
        place = self.range.start, self.range.length, self.codec, taken[1] if taken else None

        def begin() -> None:
            if self.undo is not None:
                self.undo.keep(op())

        def take_back() -> None:
            if self.undo is not None:
                self.undo.back_to(op() - 1)

        return Encoding(*place, self._keep_residual, begin, take_back)

    def _keep_residual(self, residual: Residual) -> None:
        self.residual, self.undo = residual, self.undo and Undo(residual)

    def encode(self, data: Array, memory: Array, op: int | None) -> None:
        """Encode a push of this op, (length,), into `memory`, uint8. None: its round was aborted, so the residual must
        stay."""
        assert self.codec is not None
        values = self.residual.values if isinstance(self.residual, HostResidual) else None
        if values is not None and self.undo is not None:
            if op is None:
                values = values.copy()
            else:
                self.undo.keep(op)
        self.codec.encode(data, memory, values)


@dataclass(eq=False, slots=True)
class Destination:
    """The destination of a pulled slice: `target` (length,), or `keep` for a value that is read in place. The target of
    a flat key may be Parts, that of a slice which the caller decodes AsSent."""

    slice: WorkerSlice
    target: Array | Parts | AsSent
    handle: Handle
    keep: Callable[[WorkerSlice, Array, int], None] | None = None  # takes the read-only value, which it must release
    asked: float = 0.0  # when it was pushed (or pulled, if each push is a step), time.perf_counter
    handled: float = 0.0  # Traffic.handled at the pull


@dataclass
class Traffic:
    """Counters of a link: bytes in each direction, and seconds of its threads."""

    shared_sent: int = 0
    shared_received: int = 0
    staleness: float = 0.0
    values: int = 0
    prepared: float = 0.0  # s of copying and encoding, sending thread
    landed: float = 0.0  # s of copying and decoding, receiving thread

    @property
    def handled(self) -> float:
        """Seconds that the link's threads have spent on copying and coding."""
        return self.prepared + self.landed


def moment(view: int, clock: int) -> int:
    """A view and a clock as one number that only grows, although the clocks begin again in each view."""
    return (view << CLOCK_BITS) + clock


def bounded(priority: int) -> int:
    """A priority within the 32 bits of the header."""
    return max(-FIRST, min(FIRST, priority))


def as_bytes(array: Array) -> memoryview:
    """A flat array's memory."""
    return memoryview(array).cast("B") if array.size else memoryview(b"")  # type: ignore[arg-type]


def to_send(data: Array | Parts) -> memoryview | list[memoryview]:
    """The memory of a push."""
    return as_bytes(data) if isinstance(data, np.ndarray) else _spread(data, lambda size: _ZEROS[:size])


def to_fill(target: Array | Parts) -> list[memoryview]:
    """The memory that a value is received into."""
    if isinstance(target, np.ndarray):
        return [as_bytes(target)]
    return _spread(target, lambda size: memoryview(bytearray(size)))


def gather(data: Array | Parts, memory: Array) -> None:
    """Copy a push into `memory`, of its type, which is all zeros between the keys of a flat key."""
    for part, place in _placed(data, memory):
        np.copyto(place, part)


def scatter(value: Array, target: Array | Parts) -> None:
    """Copy a value to its target."""
    for part, place in _placed(target, value):
        np.copyto(part, place)


def _placed(data: Array | Parts, whole: Array) -> Iterator[tuple[Array, Array]]:
    if isinstance(data, np.ndarray):
        yield data, whole
        return
    for part, place in zip(data, flat.layout([part.size for part in data], whole.itemsize), strict=True):
        yield part, whole[place]


def _spread(parts: Parts, between: Callable[[int], memoryview]) -> list[memoryview]:
    views = [view for part in parts for view in (as_bytes(part), between(-part.nbytes % ALIGNMENT))]
    return [view for view in views[:-1] if view.nbytes]
