"""What follows from pushes and pulls. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.kvstore.server.slice import Buffer, ServerSlice, Work


@dataclass(eq=False, slots=True)
class Reply:
    """The value for `worker`'s pull of (key, slice) at `clock`; of a group: see Lockstep.name_for. Call
    `release` once it is read."""

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
