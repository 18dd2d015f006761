"""Frames that wait for a link, and the thread that sends them: highest priority first, else in their order."""

from __future__ import annotations

import heapq
import itertools
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmltrain.kvstore.transport.link import Closed, Link

GATHER_BYTES = 1 << 20  # small frames leave together up to this size, or to a link's window where that is less
GATHER_FRAMES = 256  # header and payload each, below IOV_MAX (1024)
LAST = -(1 << 30)  # priority of requests: after the pushes before them
BEFORE_ALL = 1 << 40  # priority of the rest of a frame

Prepare = Callable[[], tuple[bytes, memoryview | None]]  # makes a frame's header and payload when its turn has come


@dataclass(eq=False, slots=True)
class Frame:
    """What an Outbox sends. `sent` is called once the payload may be changed again (also when the link is cut);
    `prepare` makes header and payload on the sending thread, when the frame's turn has come."""

    header: bytes
    payload: memoryview | None = None
    priority: int = 0
    sent: Callable[[], None] | None = None
    prepare: Prepare | None = None
    prepared_bytes: int = GATHER_BYTES  # what takes time to make leaves at once; its memory may be used by the next

    @property
    def size(self) -> int:
        if self.prepare:
            return self.prepared_bytes
        return len(self.header) + (self.payload.nbytes if self.payload is not None else 0)

    def views(self) -> list[memoryview]:
        if self.prepare:
            self.header, self.payload = self.prepare()
        return [memoryview(each) for each in (self.header, self.payload) if each is not None]


class Outbox:
    """Frames waiting for one link, highest priority first, first in first out within one; sent by a thread of its own.

    Through a unix socket headers without payload leave at once, on the caller's thread, while nothing waits.
    """

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self._at_once = link.sock.family == socket.AF_UNIX
        self._queue: list[tuple[int, int, Frame]] = []
        self._order = itertools.count()
        self._ready = threading.Condition()
        self._sending = False
        self._closing = False
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
        """Send these; together they cost little more than one."""
        with self._ready:
            if self._at_once and not self._queue and not self._sending and all(map(_is_header, frames)):
                frames = self._send_now(frames)
            for frame in frames:
                heapq.heappush(self._queue, (-frame.priority, next(self._order), frame))
            if frames:
                self._ready.notify()

    def _send_now(self, frames: Sequence[Frame]) -> list[Frame]:
        """Send what the socket takes without a wait; returns what is left, if anything, as one frame."""
        data = b"".join([frame.header for frame in frames])
        sent = self.link.send_now(data)
        for frame in frames:
            if frame.sent:
                frame.sent()
        return [Frame(data[sent:], priority=BEFORE_ALL)] if sent < len(data) else []

    def finish(self, timeout: float) -> bool:
        """Send what is queued, then end the thread; False when that took longer than `timeout` seconds."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while batch := self._next():
            try:
                self.link.send(*(view for frame in batch for view in frame.views()))
            except Closed:
                self.link.cut()
            except Exception:  # out of memory for a frame: cut the link, so that no peer waits for it
                traceback.print_exc()
                self.link.cut()
            for frame in batch:
                if frame.sent:
                    frame.sent()

    def _next(self) -> list[Frame]:
        with self._ready:
            self._sending = False
            while not self._queue:
                if self._closing:
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


def _is_header(frame: Frame) -> bool:
    return frame.payload is None and frame.prepare is None
