"""What follows from pushes and pulls. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.kvstore.server.slice import Buffer, ServerSlice, Work


@dataclass(eq=False, slots=True)
class Reply:
    """The value for `worker`'s pull of (key, slice) at `clock`; of a group: see Lockstep.name_for. Call
    ServerCore.release once it is read."""

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


Action = Reply | Work
