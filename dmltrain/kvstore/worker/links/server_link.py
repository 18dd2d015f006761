"""A worker's link to one server: pushes and pulls of slices, requests, and a thread that receives the answers.

The clock of a slice numbers its pushes and pulls. A value is received into the memory that its pull has named. Answers
to requests (other than pulls) arrive in the order of the requests. If server and worker are on the same host, pushes
and values lie in shared memory, and only their offsets are sent (rendezvous.py, shared_memory.py).

In an elastic job every frame has the number of a view. Requests and pulls of earlier views are forgotten: the server
does not answer them, or its answers come late and are dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.transport import message, state, wire
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.data import Error, Leave
from dmltrain.kvstore.transport.outbox import AFTER_ALL, LAST, Frame, Outbox
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header
from dmltrain.kvstore.worker.links.landing import Landing
from dmltrain.kvstore.worker.links.worker_slice import (
    FIRST,
    Destination,
    Parts,
    Traffic,
    WorkerSlice,
    as_bytes,
    bounded,
    gather,
    moment,
    to_send,
)


@dataclass(eq=False, slots=True)
class Request:
    """A request that the server has not answered. `answer` gets the state that the server sends, if any."""

    handle: Handle
    answer: list[bytearray]
    leaves: bool  # it is LEAVE, which servers answer in every view


@dataclass(eq=False)
class ServerLink:
    """`lost(error)` is called when the link ends, `rejected(reason)` when the server could not serve a request."""

    name: str
    link: Link
    lost: Callable[[Exception], None]
    rejected: Callable[[str], None]
    to_relay: bool = False  # the peer is a relay: values come from other hosts
    traffic: Traffic = field(default_factory=Traffic)
    view: int = 0  # of the frames that are made from now on
    op: int = 0  # of the pushes that are made from now on, in an elastic job
    retired: bool = False  # the job goes on without this server, or has ended
    job_ended: bool = False
    echoed: Callable[[int], None] | None = None  # called with the size of each PROBE that comes back
    outbox: Outbox = field(init=False)
    _landing: Landing = field(init=False)
    _requests: deque[Request] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards view, _landing, _requests and traffic
    _coding: threading.Lock = field(default_factory=threading.Lock)  # held while pushes are prepared

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.link, f"to {self.name}")
        self._landing = Landing(self.link, self.traffic, self._read, self.to_relay)
        threading.Thread(target=self._receive, name=f"from {self.name}", daemon=True).start()

    # -- sending --------------------------------------------------------------------------------------------------

    def push(
        self,
        slice_: WorkerSlice,
        data: Array | Parts,
        clock: int,
        rate: float,
        priority: int,
        flags: int = 0,
        ready: float = 0.0,
        offset: int | None = None,
    ) -> Frame:
        """The PUSH frame of one slice's gradient `data` (length,), or of its bytes if the caller has encoded it. They
        must not change until its value has arrived. `ready`: when the gradient was ready, time.perf_counter; `offset`:
        of `data` in the arena, if known."""
        arena, coded = self.link.own_arena, _is_encoded(slice_, data)
        if arena is None or (slice_.codec and not coded) or not slice_.nbytes:
            offset = None
        elif offset is None and isinstance(data, np.ndarray):
            offset = arena.offset_of(data)
        if offset is None:
            return self._push_later(slice_, data, clock, rate, priority, flags, ready)
        self._count_shared(slice_.push_bytes)
        header = _header(slice_, self.view, clock, rate, priority, ready, flags | Flag.SHARED, offset)
        return Frame(header, None, priority, droppable=True)

    def _push_later(
        self, slice_: WorkerSlice, data: Array | Parts, clock: int, rate: float, priority: int, flags: int, ready: float
    ) -> Frame:
        """The frame of a gradient that the sending thread must copy, encode or send."""
        view = self.view  # now, because the frame may be sent when this link has entered a later view
        header = partial(_header, slice_, view, clock, rate, priority, ready)
        # In an elastic job an encoded push may be encoded again, in the same memory, while this frame is sent.
        if view if _is_encoded(slice_, data) else slice_.codec or self.link.own_arena is not None:
            last = moment(view, clock)
            prepare = partial(self._prepared, slice_, data, last, self.op, header, flags)
            return Frame(b"", priority=priority, prepare=prepare, droppable=True)
        return Frame(
            b"",
            priority=priority,
            prepare=lambda: (header(flags), to_send(data)),
            prepared_bytes=wire.HEADER_SIZE + slice_.push_bytes,
            droppable=True,
        )

    def _prepared(
        self, slice_: WorkerSlice, data: Array | Parts, last: int, op: int, header: Callable[..., bytes], flags: int
    ) -> tuple[bytes, memoryview | None]:
        """On the sending thread: copy a push of this `op` and `moment` into shared memory, or encode it. Raises Closed
        if the server is lost: its slices have other links then, which may use the same memory."""
        since = time.perf_counter()
        with self._coding:
            if self.retired:
                raise Closed(f"the job goes on without {self.name}")
            frame = self._put(slice_, data, last, op, header, flags)
        self.traffic.prepared += time.perf_counter() - since
        return frame

    def _put(
        self, slice_: WorkerSlice, data: Array | Parts, last: int, op: int, header: Callable[..., bytes], flags: int
    ) -> tuple[bytes, memoryview | None]:
        arena = self.link.own_arena
        free = arena is None or slice_.loaned <= slice_.returned
        if slice_.sending is None:
            taken = arena.take(slice_.push_bytes) if arena else None
            slice_.sending = taken[1] if taken else np.zeros(slice_.push_bytes, np.uint8)
        memory = slice_.sending if free else np.zeros(slice_.push_bytes, np.uint8)
        if _is_encoded(slice_, data):
            gather(data, memory)
        elif slice_.codec:
            assert isinstance(data, np.ndarray)
            was_aborted = last < moment(self.view, 0)
            slice_.encode(data, memory, None if was_aborted else op)
        else:
            gather(data, memory.view(slice_.dtype))
        offset = arena.offset_of(memory) if arena is not None and memory.size else None
        if offset is None:
            return header(flags), as_bytes(memory)
        slice_.loaned = last
        self._count_shared(memory.nbytes)
        return header(flags | Flag.SHARED, offset), None

    def _count_shared(self, size: int) -> None:
        with self._lock:
            self.traffic.shared_sent += size

    def expect(self, destination: Destination, clock: int) -> None:
        """Register the destination of the slice's value at `clock`. Call this before the pull."""
        destination.handled = self.traffic.handled
        with self._lock:
            self._landing.expect(destination, clock)

    def pull(self, slice_: WorkerSlice, clock: int, priority: int) -> Frame:
        """The PULL frame for the slice's value at `clock`; call `expect` first."""
        header = Header(
            FrameKind.PULL, 0, self.view, slice_.range.key, slice_.range.index, clock, priority=bounded(priority)
        )
        return Frame(header.pack(), None, priority, droppable=True)

    def release(self, read: Sequence[tuple[WorkerSlice, int]]) -> Frame:
        """The RELEASE frame for values that have been read: slices and their offsets in the server's memory."""
        return self._release((slice_.range.key, slice_.range.index, offset) for slice_, offset in read)

    def _release(self, read: Iterable[tuple[int, int, int]]) -> Frame:
        payload = wire.release(read)
        return Frame(Header(FrameKind.RELEASE, len(payload), self.view).pack() + payload, None, FIRST)

    def initialise(self, slice_: WorkerSlice, data: Array, seconds: float) -> Handle:
        header = Header(
            FrameKind.INIT, data.nbytes, self.view, slice_.range.key, slice_.range.index, dtype=slice_.value_type
        )
        return self.request(header.pack(), seconds, payload=as_bytes(data))

    def leave(self, seconds: float, done: int = -1) -> Handle:
        """Send LEAVE after all other frames; answered when the server has received all of them. `done`: see Leave."""
        return self.request(message.encode(Leave(done), self.view), seconds, priority=AFTER_ALL)

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
            if self.retired:
                _end(handle, priority == AFTER_ALL, self.job_ended)
                return handle
            self._requests.append(Request(handle, [] if answer is None else answer, leaves=priority == AFTER_ALL))
            self.outbox.put_all([Frame(frame, payload, priority, droppable=True)])
        return handle

    def last_request(self) -> Handle | None:
        with self._lock:
            return self._requests[-1].handle if self._requests else None

    # -- changes of the view --------------------------------------------------------------------------------------

    def interrupt(self, view: int) -> None:
        """This view was announced: raise ViewChanged in all waits for this server that began in an earlier view, except
        that for the answer to LEAVE. For any thread. No effect if the pushing thread has entered the view already."""
        with self._lock:
            if self.view >= view:
                return
            self._interrupt([request.handle for request in self._requests if not request.leaves])

    def enter(self, view: int) -> None:
        """From now on frames belong to this view. Drop frames of earlier views that wait to be sent, and forget all
        requests and pulls. Flat keys must not be in use. The clocks of slices begin again, so call this on the thread
        that pushes."""
        with self._coding, self._lock:
            self.view = view
            self._interrupt([request.handle for request in self._requests])
            self._landing.forget()
            self._requests.clear()
        self.outbox.drop()

    def retire(self, job_ended: bool = False) -> None:
        """The job goes on without this server: end all waits for it as `interrupt` does; or, before this worker has
        joined, the job has ended: they raise MembershipEnded. A wait for the answer to LEAVE ends without an error: a
        worker that leaves needs nothing from this server. For any thread."""
        with self._coding, self._lock:  # afterwards this link uses no slice any more: another link gets the slices
            self.retired, self.job_ended = True, job_ended
            self._interrupt([])
            for request in self._requests:
                _end(request.handle, request.leaves, job_ended)
        self.link.cut()
        self.outbox.finish(0.0)

    def _interrupt(self, asked: Sequence[Handle]) -> None:
        """Interrupt the waits for these requests and for all pulls. Call this with the lock held."""
        for handle in (*asked, *self._landing.handles):
            handle.interrupt(self.job_ended)

    # -- receiving ------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Fail all pending pulls and requests, and cut the link."""
        with self._lock:
            for handle in (*self._landing.handles, *(request.handle for request in self._requests)):
                handle.fail(reason)
        self.link.cut()

    def _receive(self) -> None:
        try:
            while True:
                self._take(self.link.read_header())
        except (Closed, OSError) as error:
            self._ended(error)
        except Exception as error:  # after any error no thread may wait for this server
            self._ended(FrameError(f"{self.name} sent an unexpected frame: {error!r}"))

    def _ended(self, error: Exception) -> None:
        if not self.retired:
            self.lost(error)
        if self.retired:
            self.link.close()  # here, because no other code closes a retired link before the job ends

    def _take(self, header: Header) -> None:
        if header.kind == FrameKind.VALUE:
            self._take_value(header)
        elif header.kind == FrameKind.PROBE and self.echoed:
            self.echoed(len(self.link.read_payload(header, wire.MAX_PROBE)))
        elif header.kind == FrameKind.ERROR:
            self.rejected(message.expect(self.link.read_message(header), Error).reason)
        else:
            self._answer(header)

    def _take_value(self, header: Header) -> None:
        with self._lock:  # so no value of an earlier view is kept after `enter`
            found = None if header.view < self.view else self._landing.find(header)
        if found is not None:
            self._landing.land(header, *found)
        elif header.flags & Flag.SHARED:  # of an earlier view: nobody waits for it
            self._read(header.key, header.slice, header.offset)
        else:
            self.link.discard(header)

    def _read(self, key: int, index: int, offset: int) -> None:
        """A value in the server's memory has been read."""
        self.outbox.put_all([self._release([(key, index, offset)])])

    def _answer(self, header: Header) -> None:
        with self._lock:
            request = None if header.view < self.view else self._requests.popleft()
        if header.kind not in (FrameKind.DONE, FrameKind.STATE):
            raise FrameError(f"frame kind {header.kind}")
        if request is None:  # it has been forgotten
            return self.link.discard(header)
        if header.kind == FrameKind.STATE:
            request.answer.append(state.receive(self.link, header))
        request.handle.one_done()


def _is_encoded(slice_: WorkerSlice, data: Array | Parts) -> bool:
    """Whether the push has been encoded by the caller."""
    return slice_.codec is not None and isinstance(data, np.ndarray) and data.dtype == np.uint8


def _header(
    slice_: WorkerSlice, view: int, clock: int, rate: float, priority: int, ready: float, flags: int, offset: int = 0
) -> bytes:
    """The header of a PUSH that is sent now."""
    return Header(
        FrameKind.PUSH,
        slice_.push_bytes,
        view,
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


def _end(handle: Handle, leaves: bool, job_ended: bool) -> None:
    """End the wait for a request to a server that is lost. `leaves`: the request is LEAVE."""
    if leaves:
        handle.one_done()
    else:
        handle.interrupt(job_ended)
