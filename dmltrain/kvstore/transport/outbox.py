"""A link's queue of frames, and the thread that sends them: highest priority first, first in, first out within one."""

from __future__ import annotations

import heapq
import itertools
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmltrain.kvstore.transport.link import Closed, Link

GATHER_BYTES = 1 << 20  # small frames are sent together up to this size, or up to the link's window if that is less
GATHER_FRAMES = 256  # each has a header and a payload: below IOV_MAX (1024)
MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES = 1 << 26, 1 << 14  # of answers that a peer has not read; see `wait_for_room`
LAST = -(1 << 30)  # priority of requests: they are sent after earlier pushes
BEFORE_ALL = 1 << 40  # priority of the rest of a frame
AFTER_ALL = -BEFORE_ALL  # priority of the last frame

Payload = memoryview | Sequence[memoryview] | None  # in one piece, or in several
Prepare = Callable[[], tuple[bytes, Payload]]  # returns header and payload


@dataclass(eq=False, slots=True)
class Frame:
    """A frame to send. `sent` is called when the payload may be changed again; also if the link is cut, if the frame is
    dropped, or if it came after the end of the thread. `prepare` computes header and payload on the sending thread,
    just before they are sent."""

    header: bytes
    payload: Payload = None
    priority: int = 0
    sent: Callable[[], None] | None = None
    prepare: Prepare | None = None
    prepared_bytes: int = GATHER_BYTES  # default: send it alone, because the next frame may use the same memory
    droppable: bool = False  # see Outbox.drop

    @property
    def size(self) -> int:
        if self.prepare:
            return self.prepared_bytes
        return len(self.header) + sum(part.nbytes for part in self._parts())

    def views(self) -> list[memoryview]:
        if self.prepare:
            self.header, self.payload = self.prepare()
        return [memoryview(self.header), *self._parts()]

    def _parts(self) -> Sequence[memoryview]:
        if self.payload is None:
            return ()
        return (self.payload,) if isinstance(self.payload, memoryview) else self.payload


class Outbox:
    """The queue of one link, and the thread that sends from it.

    On a unix socket, headers without payload are sent immediately, on the caller's thread, if the queue is empty.
    """

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self._immediate = link.sock.family == socket.AF_UNIX
        self._queue: list[tuple[int, int, Frame]] = []
        self._bytes = 0  # of the frames in the queue and those that are being sent
        self._order = itertools.count()
        lock = threading.RLock()
        self._ready = threading.Condition(lock)  # there is a frame to send
        self._room = threading.Condition(lock)  # there may be room for another
        self._sending = False
        self._closing = False
        self._ended = False  # the thread has
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(
        self,
        header: bytes,
        payload: memoryview | None = None,
        priority: int = 0,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send one frame."""
        self.put_all([Frame(header, payload, priority, sent)])

    def put_all(self, frames: Sequence[Frame]) -> None:
        """Send these frames; in one call they cost little more than one frame."""
        with self._ready:
            if self._immediate and not self._queue and not self._sending and all(map(_is_header, frames)):
                frames = self._send_now(frames)
            late = frames if self._ended else ()
            for frame in () if self._ended else frames:
                heapq.heappush(self._queue, (-frame.priority, next(self._order), frame))
                self._bytes += frame.size
            if frames:
                self._ready.notify()
        _note_sent(late)

    def _send_now(self, frames: Sequence[Frame]) -> list[Frame]:
        """Send what the socket accepts without blocking; returns the rest, if any, as one frame."""
        data = b"".join([frame.header for frame in frames])
        sent = self.link.send_now(data)
        _note_sent(frames)
        return [Frame(data[sent:], priority=BEFORE_ALL)] if sent < len(data) else []

    def drop(self) -> None:
        """Remove all droppable frames from the queue. A frame that is being sent is sent completely."""
        with self._ready:
            dropped = [item[2] for item in self._queue if item[2].droppable]
            self._queue = [item for item in self._queue if not item[2].droppable]
            heapq.heapify(self._queue)
            self._bytes -= sum(frame.size for frame in dropped)
            if self._has_room():
                self._room.notify()
        _note_sent(dropped)

    def wait_for_room(self) -> None:
        """Return when fewer than MAX_QUEUED_BYTES and MAX_QUEUED_FRAMES wait to be sent, or the link is cut. The thread
        that reads from a peer calls this: so requests of a peer that does not read its answers are not read either, and
        this process's memory stays limited."""
        if self._has_room():
            return
        with self._room:
            self._room.wait_for(self._has_room)

    def _has_room(self) -> bool:
        return self._bytes < MAX_QUEUED_BYTES and len(self._queue) < MAX_QUEUED_FRAMES

    def finish(self, timeout: float) -> bool:
        """Send what is queued, then end the thread; False if that takes longer than `timeout` seconds."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        size = 0
        while batch := self._next(size):
            size = sum(frame.size for frame in batch)
            try:
                self.link.send_all([frame.views() for frame in batch])
            except Closed:
                self.link.cut()
            except Exception:  # out of memory for a frame: cut the link, so that no peer waits for it
                traceback.print_exc()
                self.link.cut()
            _note_sent(batch)

    def _next(self, sent: int) -> list[Frame]:
        """The next frames to send, after `sent` bytes were sent."""
        with self._ready:
            self._sending = False
            self._bytes -= sent
            if self._has_room():
                self._room.notify()
            while not self._queue:
                if self._closing:
                    self._ended = True
                    return []
                self._ready.wait()
            batch: list[Frame] = []
            size = 0
            most = min(GATHER_BYTES, self.link.window.size) if self.link.window else GATHER_BYTES
            while self._queue and len(batch) < GATHER_FRAMES and size < most:
                frame = heapq.heappop(self._queue)[2]
                batch.append(frame)
                size += frame.size
            self._sending = True
            return batch


def _note_sent(frames: Sequence[Frame]) -> None:
    for frame in frames:
        if frame.sent:
            frame.sent()


def _is_header(frame: Frame) -> bool:
    return frame.payload is None and frame.prepare is None
