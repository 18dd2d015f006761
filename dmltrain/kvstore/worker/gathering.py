"""Values of all workers side by side (an all-gather), through the servers.

Each worker's part is a key of its own, which only this worker pushes. It lies on a server of the worker's own host, if
there is one; so a part crosses the network once for each other worker that pulls it. The other workers' parts are
received into the rows of one array; a worker's own part is copied there.

No worker is more than one step ahead of another, because it pushes its part of step k + 1 only when it has all parts of
step k. So two copies are enough on both sides. A worker sends its parts from two buffers in turns: when it writes part
k + 2, all others have part k, because they have pushed their parts k + 1. A server keeps the last part and the one
before it: when part k + 1 arrives, another worker's pull of part k may still be on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, Key
from dmltrain.kvstore.transport.message.job import Start
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.transfers import Transfers


@dataclass(eq=False)
class Gathered:
    """One gathered key on a worker: the keys of the parts by rank."""

    parts: list[Key]
    rows: Array  # (workers, elements) float32
    sending: tuple[Array, Array]  # (elements,), in turns
    turn: int = 0

    def place(self, key: Key, rank: int, part: Array) -> Array:
        """Copy this worker's part into its row, and into the buffer from which it is sent, which is returned. Raises
        UserError if its size or type is not as declared."""
        if part.size != self.rows.shape[1] or part.dtype != self.rows.dtype:
            raise UserError(
                f"kvstore: a part of key {key!r} was declared with {self.rows.shape[1]} elements of float32; this one "
                f"has {part.size} of {part.dtype.name}"
            )
        sending, self.turn = self.sending[self.turn], 1 - self.turn
        sending[:] = self.rows[rank] = part
        return sending


@dataclass(eq=False)
class Gathering:
    """The gathered keys of the worker `rank`."""

    member: Membership
    entries: KeyEntries
    transfers: Transfers
    rank: int
    _keys: dict[Key, Gathered] = field(default_factory=dict)

    def init(self, keys: Sequence[Key], sizes: Sequence[int]) -> None:
        """Declare keys with their elements of each worker. Every worker must make the same call."""
        servers = servers_of(self.member.start_message, self.entries.shares)
        for key, size in zip(keys, sizes, strict=True):
            if key in self._keys:
                raise UserError(f"kvstore: key {key!r} was declared twice for gather")
            parts: list[Key] = [f"{key} of worker {rank}" for rank in range(len(servers))]
            places = [near[len(self._keys) % len(near)] for near in servers]
            self.entries.declare_parts(parts, [size] * len(parts), places)
            own = parts[self.rank]
            sending = self.transfers.memory(own), self.transfers.memory(own)
            self._keys[key] = Gathered(parts, np.zeros((len(parts), size), np.float32), sending)
        self.member.flush()
        self.transfers.barrier()

    def _find(self, key: Key) -> Gathered:
        if key not in self._keys:
            raise UserError(f"kvstore: key {key!r} was not declared for gather: call init_gathered first")
        return self._keys[key]

    def gather(self, keys: Sequence[Key], parts: Sequence[Array], priority: int) -> Handle:
        """See KVStore.gather."""
        gathered = [self._find(key) for key in keys]
        own = [values.place(key, self.rank, part) for key, values, part in zip(keys, gathered, parts, strict=True)]
        self.transfers.push([values.parts[self.rank] for values in gathered], own, priority, -1.0)
        others = [(values, rank) for values in gathered for rank in range(len(values.parts)) if rank != self.rank]
        names, rows = [values.parts[rank] for values, rank in others], [values.rows[rank] for values, rank in others]
        handle = self.transfers.pull_next(names, rows, priority)
        handle.values += [values.rows for values in gathered]
        return handle


def servers_of(start: Start, shares: Sequence[float] | None = None) -> list[list[int]]:
    """For each worker the servers on its host; if there are none, one server of another host. Servers that hold no
    weights (see sharding.shares) hold no parts."""
    able = [number for number in range(len(start.servers)) if shares is None or shares[number] > 0.0]
    near = [
        [number for number in able if worker.host_id and start.servers[number].host_id == worker.host_id]
        for worker in start.workers
    ]
    return [servers or [able[rank % len(able)]] for rank, servers in enumerate(near)]
