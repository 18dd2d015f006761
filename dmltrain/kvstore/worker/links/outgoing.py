"""The frames of one call, for all its keys, grouped by server. Each server's frames need one lock and one wake-up, or
one system call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dmltrain.kvstore.transport.outbox import Frame
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice


@dataclass(eq=False)
class Outgoing:
    """Frames for several servers, in order, and the values in the servers' memory to release with them."""

    _frames: dict[ServerLink, list[Frame]] = field(default_factory=lambda: defaultdict(list))
    _read: dict[ServerLink, list[tuple[WorkerSlice, int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, server: ServerLink, frame: Frame) -> None:
        self._frames[server].append(frame)

    def add_read(self, server: ServerLink, read: tuple[WorkerSlice, int]) -> None:
        """Release a slice's value at an offset of the server's memory."""
        self._read[server].append(read)

    def send(self, servers: Sequence[ServerLink]) -> None:
        """Send the frames of these servers, in the order of `servers`."""
        for server in servers:
            frames = self._frames[server]
            if self._read[server]:
                frames.insert(0, server.release(self._read[server]))
            if frames:
                server.outbox.put_all(frames)
