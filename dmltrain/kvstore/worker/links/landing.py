"""Where the values of a server land: each is received, copied or decoded into the memory that its pull has named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.wire import Flag, FrameError, Header
from dmltrain.kvstore.waiting import Trip
from dmltrain.kvstore.worker.links.worker_slice import Destination, Traffic, as_bytes, moment, scatter, to_fill


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
        coded = header.dtype != destination.slice.value_type
        if header.flags & Flag.SHARED:
            self._copy_shared(header, destination, coded)
        elif coded:
            self._receive_coded(destination)
        elif header.length:
            self.link.read_parts(to_fill(destination.target))

    def _copy_shared(self, header: Header, destination: Destination, coded: bool) -> None:
        data, since = self._shared(header), time.perf_counter()
        if coded:
            assert destination.slice.result_codec is not None and isinstance(destination.target, np.ndarray)
            destination.slice.result_codec.decode(data, destination.target)
        else:
            scatter(data.view(destination.slice.dtype), destination.target)
        self.traffic.landed += time.perf_counter() - since
        self.release(header.key, header.slice, header.offset)

    def _receive_coded(self, destination: Destination) -> None:
        slice_ = destination.slice
        assert slice_.result_codec is not None and isinstance(destination.target, np.ndarray)
        if slice_.receiving is None:
            slice_.receiving = np.empty(slice_.result_codec.nbytes(slice_.range.length), np.uint8)
        self.link.read_into(as_bytes(slice_.receiving))
        since = time.perf_counter()
        slice_.result_codec.decode(slice_.receiving, destination.target)
        self.traffic.landed += time.perf_counter() - since

    def _shared(self, header: Header) -> Array:
        """A value in the server's memory, uint8."""
        if self.link.peer_arena is None:
            raise FrameError("a value in shared memory, but this link shares none")
        return self.link.peer_arena.view(header.offset, header.length)
