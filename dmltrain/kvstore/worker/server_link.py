"""A worker's link to one server: pushes and pulls of slices, requests, and a thread that receives the answers.

Pushes and pulls of a slice are numbered by its clock; a value is received into the memory that its pull has named.
Answers to requests (other than pulls) arrive in the order of the requests. If server and worker are on one host, pushes
and values lie in shared memory and only their offsets are sent (rendezvous.py, shared_memory.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.transport import message, state, wire
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message import Error, Leave
from dmltrain.kvstore.transport.outbox import AFTER_ALL, LAST, Frame, Outbox
from dmltrain.kvstore.transport.wire import Flag, FrameError, Header, Kind
from dmltrain.kvstore.waiting import Trip
from dmltrain.kvstore.worker.link_groups import LinkGroups
from dmltrain.kvstore.worker.worker_slice import FIRST, Landing, Traffic, WorkerSlice, as_bytes, bounded


@dataclass(eq=False)
class ServerLink:
    """`lost(error)` is called when the link ends, `rejected(reason)` when the server could not serve a request."""

    name: str
    rank: int  # this worker's
    link: Link
    lost: Callable[[Exception], None]
    rejected: Callable[[str], None]
    to_relay: bool = False  # the peer is a relay: values come from other hosts
    traffic: Traffic = field(default_factory=Traffic)
    echoed: Callable[[int], None] | None = None  # called with the size of each PROBE that comes back
    outbox: Outbox = field(init=False)
    groups: LinkGroups = field(init=False)
    _pulls: dict[tuple[int, int, int], list[Landing]] = field(default_factory=dict)
    _requests: deque[tuple[Handle, list[bytearray]]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards _pulls, _requests, groups and traffic

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.link, f"to {self.name}")
        self.groups = LinkGroups(self.rank, self.link, self.outbox, self.traffic, self._lock, self._pulls)
        threading.Thread(target=self._receive, name=f"from {self.name}", daemon=True).start()

    # -- sending --------------------------------------------------------------------------------------------------

    def push(
        self,
        slice_: WorkerSlice,
        data: Array,
        clock: int,
        rate: float,
        priority: int,
        flags: int = 0,
        ready: float = 0.0,
        offset: int | None = None,
    ) -> Frame:
        """The PUSH frame of one slice's gradient `data` (length,), which must not change until its value has arrived.
        `ready`: when the gradient was ready, time.perf_counter; `offset`: of `data` in the arena, if known."""
        arena = self.link.own_arena
        if arena is None or slice_.codec or not data.size:
            offset = None
        elif offset is None:
            offset = arena.offset_of(data)
        if offset is None:
            return self._push_later(slice_, data, clock, rate, priority, flags, ready)
        self._count_shared(data.nbytes)
        header = Header(
            Kind.PUSH,
            slice_.push_bytes,
            self.rank,
            slice_.range.key,
            slice_.range.index,
            clock,
            rate,
            slice_.push_type,
            flags | Flag.SHARED,
            offset,
            time.perf_counter() - ready,
            priority=bounded(priority),
        )
        return Frame(header.pack(), None, priority)

    def _push_later(
        self, slice_: WorkerSlice, data: Array, clock: int, rate: float, priority: int, flags: int, ready: float
    ) -> Frame:
        """The frame of a gradient that the sending thread must copy, encode or send."""

        def header(flags: int = flags, offset: int = 0) -> bytes:
            return Header(
                Kind.PUSH,
                slice_.push_bytes,
                self.rank,
                slice_.range.key,
                slice_.range.index,
                clock,
                rate,
                slice_.push_type,
                flags,
                offset,
                time.perf_counter() - ready,
                priority=bounded(priority),
            ).pack()

        if slice_.codec or self.link.own_arena is not None:
            return Frame(b"", priority=priority, prepare=lambda: self._prepared(slice_, data, clock, header, flags))
        return Frame(
            b"",
            priority=priority,
            prepare=lambda: (header(), as_bytes(data)),
            prepared_bytes=wire.HEADER_SIZE + data.nbytes,
        )

    def _prepared(
        self, slice_: WorkerSlice, data: Array, clock: int, header: Callable[..., bytes], flags: int
    ) -> tuple[bytes, memoryview | None]:
        """On the sending thread: copy the push into shared memory, or encode it."""
        since = time.perf_counter()
        arena = self.link.own_arena
        free = arena is None or slice_.loaned <= slice_.returned
        if slice_.sending is None:
            taken = arena.take(slice_.push_bytes) if arena else None
            slice_.sending = taken[1] if taken else np.empty(slice_.push_bytes, np.uint8)
        memory = slice_.sending if free else np.empty(slice_.push_bytes, np.uint8)
        if slice_.codec:
            slice_.codec.encode(data, memory, slice_.residual)
        else:
            np.copyto(memory.view(data.dtype), data)
        self.traffic.prepared += time.perf_counter() - since
        offset = arena.offset_of(memory) if arena is not None and memory.size else None
        if offset is None:
            return header(), as_bytes(memory)
        slice_.loaned = clock
        self._count_shared(memory.nbytes)
        return header(flags | Flag.SHARED, offset), None

    def _count_shared(self, size: int) -> None:
        with self._lock:
            self.traffic.shared_sent += size

    def expect(self, landing: Landing, clock: int) -> None:
        """Register the destination of the slice's value at `clock`. Call this before the pull."""
        where = landing.slice.range
        landing.handled = self.traffic.handled
        with self._lock:
            self._pulls.setdefault((where.key, where.index, clock), []).append(landing)

    def pull(self, slice_: WorkerSlice, clock: int, priority: int) -> Frame:
        """The PULL frame for the slice's value at `clock`; call `expect` first."""
        header = Header(
            Kind.PULL, 0, self.rank, slice_.range.key, slice_.range.index, clock, priority=bounded(priority)
        )
        return Frame(header.pack(), None, priority)

    def release(self, read: Sequence[tuple[WorkerSlice, int]]) -> Frame:
        """The RELEASE frame for values that have been read: slices and their offsets in the server's memory."""
        payload = wire.release((slice_.range.key, slice_.range.index, offset) for slice_, offset in read)
        return Frame(Header(Kind.RELEASE, len(payload), self.rank).pack() + payload, None, FIRST)

    def initialise(self, slice_: WorkerSlice, data: Array, seconds: float) -> Handle:
        header = Header(
            Kind.INIT, data.nbytes, self.rank, slice_.range.key, slice_.range.index, dtype=slice_.value_type
        )
        return self.request(header.pack(), seconds, payload=as_bytes(data))

    def leave(self, seconds: float) -> Handle:
        """Send LEAVE after all other frames; answered when the server has received all of them."""
        return self.request(message.encode(Leave()), seconds, priority=AFTER_ALL)

    def request(
        self,
        frame: bytes,
        seconds: float,
        answer: list[bytearray] | None = None,
        payload: memoryview | None = None,
        priority: int = LAST,
    ) -> Handle:
        """Send a frame that the server answers with DONE, or with STATE, which is appended to `answer`."""
        handle = Handle(1, f"request to {self.name}", seconds)
        with self._lock:  # so that both queues have the same order
            self._requests.append((handle, [] if answer is None else answer))
            self.outbox.put(frame, payload, priority)
        return handle

    def last_request(self) -> Handle | None:
        with self._lock:
            return self._requests[-1][0] if self._requests else None

    # -- receiving ------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Fail all pending pulls and requests, and cut the link."""
        with self._lock:
            for waiting in self._pulls.values():
                for landing in waiting:
                    landing.handle.fail(reason)
            for handle, _ in self._requests:
                handle.fail(reason)
            self.groups.fail(reason)
        self.link.cut()

    def _receive(self) -> None:
        try:
            while True:
                self._take(self.link.read_header())
        except (Closed, OSError) as error:
            self.lost(error)
        except Exception as error:  # after any error no thread may wait for this server
            self.lost(FrameError(f"{self.name} sent an unexpected frame: {error!r}"))

    def _take(self, header: Header) -> None:
        if header.kind == Kind.VALUE:
            self._land(header)
        elif header.kind == Kind.VALUE_GROUP:
            self.groups.land(header)
        elif header.kind == Kind.PROBE and self.echoed:
            self.echoed(len(self.link.read_payload(header, wire.MAX_PROBE)))
        elif header.kind == Kind.ERROR:
            self.rejected(message.expect(self.link.read_message(header), Error).reason)
        else:
            self._answer(header)

    def _land(self, header: Header) -> None:
        with self._lock:
            landing = self.groups.take_alone(header.key, header.slice, header.clock)
            self._count(header)
        slice_ = landing.slice
        coded = slice_.result_codec is not None and header.dtype == slice_.result_codec.number
        expected = slice_.result_codec.nbytes(slice_.range.length) if coded and slice_.result_codec else slice_.nbytes
        if header.length != expected or (not coded and header.dtype != slice_.value_type):
            raise FrameError(f"{header.length} bytes of type {header.dtype} for key {header.key}, expected {expected}")
        if header.flags & Flag.SHARED:
            self._read_shared(header, landing, coded)
        elif coded:
            self._receive_coded(landing)
        elif header.length:
            self.link.read_into(as_bytes(landing.target))
        slice_.returned = max(slice_.returned, header.clock)
        landing.handle.one_done(
            Trip(
                landing.asked,
                header.waited,
                header.worked,
                self.traffic.handled - landing.handled,
                bool(header.flags & Flag.SHARED) and not self.to_relay,
            )
        )

    def _read_shared(self, header: Header, landing: Landing, coded: bool) -> None:
        if self.link.peer_arena is None:
            raise FrameError("a value in shared memory, but this link shares none")
        data = self.link.peer_arena.view(header.offset, header.length)
        if landing.keep and not coded:
            return landing.keep(landing.slice, data.view(landing.slice.dtype), header.offset)
        since = time.perf_counter()
        if coded:
            assert landing.slice.result_codec is not None
            landing.slice.result_codec.decode(data, landing.target)
        else:
            np.copyto(landing.target, data.view(landing.slice.dtype))
        self.traffic.landed += time.perf_counter() - since
        self.outbox.put_all([self.release([(landing.slice, header.offset)])])

    def _receive_coded(self, landing: Landing) -> None:
        slice_ = landing.slice
        assert slice_.result_codec is not None
        if slice_.receiving is None:
            slice_.receiving = np.empty(slice_.result_codec.nbytes(slice_.range.length), np.uint8)
        self.link.read_into(as_bytes(slice_.receiving))
        since = time.perf_counter()
        slice_.result_codec.decode(slice_.receiving, landing.target)
        self.traffic.landed += time.perf_counter() - since

    def _count(self, header: Header) -> None:
        traffic = self.traffic
        traffic.values += 1
        traffic.staleness += header.number
        if header.flags & Flag.SHARED:
            traffic.shared_received += header.length

    def _answer(self, header: Header) -> None:
        with self._lock:
            handle, answer = self._requests.popleft()
        if header.kind == Kind.STATE:
            answer.append(state.receive(self.link, header))
        elif header.kind != Kind.DONE:
            raise FrameError(f"frame kind {header.kind}")
        handle.one_done()
