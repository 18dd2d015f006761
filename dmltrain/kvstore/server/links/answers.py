"""The values that a service sends to its workers: their frames, and which values workers still read."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Collection
from typing import TypeVar

from dmltrain.kvstore.server.reply import Reply, Unread
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.outbox import Frame, Outbox
from dmltrain.kvstore.transport.wire import Flag, FrameKind, Header

Item = TypeVar("Item")


class Answers:
    """`lock` guards the core. `outboxes` has the queue to each worker and relay, `joining` that to each replacement of
    a lost worker until a view has it. The caller fills both."""

    def __init__(self, lock: threading.Lock) -> None:
        self.outboxes: dict[int, Outbox] = {}
        self.joining: dict[int, Outbox] = {}
        self._lock = lock
        self._view = 0  # its number
        self._unread = Unread()
        self._replies: deque[tuple[Outbox, Frame]] = deque()  # to be sent

    def queue(self, reply: Reply) -> None:
        """Queue a value for `send`. Call this with the lock held."""
        outbox = self.outboxes.get(reply.worker)
        if outbox is None:
            return reply.release()
        shared = outbox.link.own_arena is not None and self._unread.lend(reply)
        sent, payload = (None, None) if shared else (lambda: self._sent(reply), reply.buffer.views())
        self._replies.append((outbox, Frame(_header(reply, self._view, shared), payload, reply.priority, sent)))

    def send(self) -> None:
        """Send the queued values, also those of other threads. Call this without the lock: it may be a system call."""
        frames = defaultdict(list)
        while (reply := next_of(self._replies)) is not None:
            frames[reply[0]].append(reply[1])
        for outbox, batch in frames.items():
            outbox.put_all(batch)

    def released(self, worker: int, outbox: Outbox, payload: bytearray) -> None:
        """A RELEASE from the worker at the end of this queue. Raises Rejected or FrameError."""
        with self._lock:
            if self.outboxes.get(worker) is not outbox:  # it was removed: all is released
                return
            for key, index, offset in wire.parse_release(payload):
                self._unread.released(worker, key, index, offset).release()

    def release_all(self, worker: int) -> None:
        """The worker reads nothing any more. Call this with the lock held."""
        for reply in self._unread.left(worker):
            reply.release()

    def enter(self, view: int, members: Collection[int], gone: Collection[int]) -> None:
        """From now on values belong to this view. Release what workers that are `gone` have read, and cut their links:
        these processes may only be frozen. Replacements take their places. Call this with the lock held."""
        self._view = view
        for worker in gone:
            if removed := self.outboxes.pop(worker, None):
                removed.link.cut()
            self.release_all(worker)
        for worker in self.joining.keys() & set(members) - self.outboxes.keys():
            self.outboxes[worker] = self.joining.pop(worker)

    def _sent(self, reply: Reply) -> None:
        with self._lock:
            reply.release()


def next_of(items: deque[Item]) -> Item | None:
    """The first item, which is removed; None if there is none, as another thread may have taken the last one."""
    try:
        return items.popleft()
    except IndexError:
        return None


def _header(reply: Reply, view: int, shared: bool) -> bytes:
    return Header(
        FrameKind.VALUE,
        reply.buffer.nbytes,
        view,
        reply.key,
        reply.slice,
        reply.clock,
        reply.staleness,
        reply.dtype,
        Flag.SHARED if shared else 0,
        reply.buffer.offset or 0,
        reply.waited,
        reply.worked,
    ).pack()
