"""The results of pushes and pulls: work and replies. Workers of this host read values in this process's memory.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.server.work import Work

MAX_VALUES = 8  # of a slice that a worker may keep: each round needs memory for another
MAX_REPLIES = 1024  # with one value


@dataclass(eq=False, slots=True)
class Reply:
    """The value for `worker`'s pull of (key, slice) at `clock`. Call `release` once it is read."""

    worker: int
    key: int
    slice: int
    clock: int
    staleness: float
    buffer: Buffer
    dtype: int  # as wire.Header's
    waited: float  # s; see wire.Header
    worked: float
    priority: int
    of: ServerSlice  # which gets the buffer back

    def release(self) -> None:
        """The value has been read, or its worker has left: its buffer may be reused."""
        self.of.release(self.buffer)


Action = Reply | Work


@dataclass(eq=False)
class Unread:
    """The replies that workers read in this process's memory, until they release them."""

    # (worker, key, slice) -> offset -> replies
    _replies: dict[tuple[int, int, int], dict[int, list[Reply]]] = field(default_factory=dict)

    def lend(self, reply: Reply) -> bool:
        """Whether the worker may read the value in this process's memory, until it releases it. If not, send a copy: so
        a worker that releases nothing cannot make this server take more and more memory."""
        offset = reply.buffer.offset
        if offset is None:
            return False
        values = self._replies.setdefault((reply.worker, reply.key, reply.slice), {})
        if offset not in values and len(values) == MAX_VALUES:
            return False
        replies = values.setdefault(offset, [])
        if len(replies) == MAX_REPLIES:
            return False
        replies.append(reply)
        return True

    def released(self, worker: int, key: int, index: int, offset: int) -> Reply:
        """A reply that the worker has read. Raises Rejected if there is none."""
        values = self._replies.get((worker, key, index), {})
        if offset not in values:
            raise Rejected(f"a release of key {key} slice {index} at an offset that was not sent")
        reply = values[offset].pop()
        if not values[offset]:
            del values[offset]
        return reply

    def left(self, worker: int) -> Iterator[Reply]:
        """All replies of a worker that has left."""
        for reader, key, index in list(self._replies):
            if reader == worker:
                for replies in self._replies.pop((reader, key, index)).values():
                    yield from replies
