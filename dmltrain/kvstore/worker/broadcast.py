"""One worker's bytes for the others, through the servers and in chunks, so that servers need little memory for them.

A chunk has a key that is no weight, so that the numbers of weights do not depend on it. But it has no rounds: the
source sets the value, as `init` does, and the others pull it at clock 0. Two keys take turns, so that the source can
set one while the others still pull the other one. So one barrier for each chunk is enough.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.worker.entry import cut
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.membership import Membership

CHUNK = 1 << 22  # bytes
SMALLEST = 1 << 12  # bytes; a last chunk's size is rounded up to a power of two, so that there are few keys
CHUNK_OF_SUM = 1 << 16  # bytes; each takes 8 on the wire
Pull = Callable[[str, Array, int], Handle]  # (key, out, priority)


class Broadcast:
    """`pull`: that of Transfers; `seconds`: time limit for an answer."""

    def __init__(self, member: Membership, entries: KeyEntries, pull: Pull, rank: int, seconds: float) -> None:
        self._member, self._entries, self._pull = member, entries, pull
        self._rank, self._seconds = rank, seconds
        self._turn = 0

    def restart(self) -> None:
        """The keys have been forgotten. All members begin with the same one of the two."""
        self._turn = 0

    def __call__(self, values: Array, needed: bool, source: int) -> None:
        """See KVStore.broadcast."""
        for start in range(0, values.size, CHUNK):
            self._chunk(values[start : start + CHUNK], needed, source)

    def _chunk(self, part: Array, needed: bool, source: int) -> None:
        memory = np.zeros(_rounded(part.size) // 8, np.float64)  # a type of the kvstore; nothing is computed with it
        key, self._turn = f"broadcast {self._turn} ({memory.size})", 1 - self._turn
        if key not in self._entries:
            self._entries.declare([key], [memory], is_weight=False)
        own = memory.view(np.uint8)[: part.size]
        if self._rank == source:
            own[:] = part
            for link, slice_ in self._member.routes.direct(self._entries.find(key).slices):
                link.initialise(slice_, cut(memory, slice_), self._seconds)
        self._member.flush()
        self._member.barrier()
        if needed and self._rank != source:
            self._pull(key, memory, 0).wait()
            part[:] = own


def _rounded(size: int) -> int:
    return max(SMALLEST, 1 << (size - 1).bit_length())


def by_sums(all_reduce: Callable[[str, Array], Array], values: Array, needed: bool, is_source: bool) -> None:
    """A broadcast in a view of an elastic job: an op for each chunk, the sum of the source's bytes and zeros."""
    for start in range(0, values.size, CHUNK_OF_SUM):
        part = values[start : start + CHUNK_OF_SUM]
        total = all_reduce("bytes of one worker", part if is_source else np.zeros_like(part))
        if needed:
            part[:] = total.astype(np.uint8)
