"""Where the values of a server land: each is received, copied or decoded into the memory that its pull has named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.encoded import AsSent
from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.wire import Flag, FrameError, Header
from dmltrain.kvstore.waiting import Trip
from dmltrain.kvstore.worker.links.worker_slice import (
    Destination,
    Parts,
    Traffic,
    WorkerSlice,
    as_bytes,
    moment,
    scatter,
    to_fill,
)

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec


@dataclass(eq=False)
class Landing:
    """`release(key, slice, offset)` tells the server that a value in its memory has been read. `from_relay`: the peer
    is a relay, so values come from other hosts. The link's lock guards which values are expected."""

    link: Link
    traffic: Traffic
    release: Callable[[int, int, int], None]
    from_relay: bool
    _pulls: dict[tuple[int, int, int], list[Destination]] = field(default_factory=dict)  # by key, slice, clock

    # -- with the link's lock held --------------------------------------------------------------------------------

    def expect(self, destination: Destination, clock: int) -> None:
        """The slice's value at `clock` goes to this destination."""
        where = destination.slice.range
        self._pulls.setdefault((where.key, where.index, clock), []).append(destination)

    @property
    def handles(self) -> list[Handle]:
        """Those of all values that are expected."""
        return [destination.handle for waiting in self._pulls.values() for destination in waiting]

    def forget(self) -> None:
        """Expect nothing any more."""
        self._pulls.clear()

    def find(self, header: Header) -> tuple[Destination, bool]:
        """The destination of a value, and whether the value needs no copy, because it is read in place. Raises
        FrameError."""
        id = header.key, header.slice, header.clock
        waiting = self._pulls[id]
        destination = waiting.pop(0)
        if not waiting:
            del self._pulls[id]
        self._count(header)
        slice_ = destination.slice
        coded = slice_.result_codec is not None and header.dtype == slice_.result_codec.number
        expected = slice_.result_codec.nbytes(slice_.range.length) if coded and slice_.result_codec else slice_.nbytes
        if header.length != expected or (not coded and header.dtype != slice_.value_type):
            raise FrameError(f"{header.length} bytes of type {header.dtype} for key {header.key}, expected {expected}")
        if not header.flags & Flag.SHARED or destination.keep is None or coded:
            return destination, False
        destination.keep(slice_, self._shared(header).view(slice_.dtype), header.offset)
        return destination, True

    def _count(self, header: Header) -> None:
        traffic = self.traffic
        traffic.values += 1
        traffic.staleness += header.number
        if header.flags & Flag.SHARED:
            traffic.shared_received += header.length

    # -- without it -----------------------------------------------------------------------------------------------

    def land(self, header: Header, destination: Destination, kept: bool) -> None:
        """Take a value to its destination, unless it is `kept` where it is, and end the wait for it."""
        if not kept:
            self._receive(header, destination)
        slice_ = destination.slice
        slice_.returned = max(slice_.returned, moment(header.view, header.clock))
        destination.handle.one_done(
            Trip(
                destination.asked,
                header.waited,
                header.worked,
                self.traffic.handled - destination.handled,
                bool(header.flags & Flag.SHARED) and not self.from_relay,
            )
        )

    def _receive(self, header: Header, destination: Destination) -> None:
        slice_, as_sent = destination.slice, destination.target
        codec = slice_.result_codec if header.dtype != slice_.value_type else None
        if not isinstance(as_sent, AsSent):
            return self._take(header, slice_, as_sent, slice_.dtype, codec)
        memory, as_sent.codec = as_sent.memory[: header.length], codec
        self._take(header, slice_, memory, memory.dtype, None)
        if codec:
            codec.check_sent(memory, slice_.range.length)

    def _take(
        self, header: Header, slice_: WorkerSlice, target: Array | Parts, dtype: np.dtype[Any], codec: Codec | None
    ) -> None:
        """Bring a value of this type to its target. `codec`: with which it is decoded there."""
        is_shared = bool(header.flags & Flag.SHARED)
        if not is_shared and not codec:
            return self.link.read_parts(to_fill(target)) if header.length else None
        data = self._shared(header) if is_shared else self._received(slice_, header.length)
        since = time.perf_counter()
        if codec:
            assert isinstance(target, np.ndarray)
            codec.decode(data, target)
        else:
            scatter(data.view(dtype), target)
        self.traffic.landed += time.perf_counter() - since
        if is_shared:
            self.release(header.key, header.slice, header.offset)

    def _received(self, slice_: WorkerSlice, size: int) -> Array:
        """An encoded value, uint8."""
        if slice_.receiving is None:
            slice_.receiving = np.empty(size, np.uint8)
        self.link.read_into(as_bytes(slice_.receiving))
        return slice_.receiving

    def _shared(self, header: Header) -> Array:
        """A value in the server's memory, uint8."""
        if self.link.peer_arena is None:
            raise FrameError("a value in shared memory, but this link shares none")
        return self.link.peer_arena.view(header.offset, header.length)
