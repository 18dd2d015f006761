"""A slice on its server, and its buffers. Pure: numpy, no threads.

A value is never written while it is being read. So a sum goes into a buffer without readers, and a step on a
value that has readers writes its result to a new buffer. If no worker lags, two buffers take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.memory import Allocate, Buffer, private
from dmltrain.kvstore.server.pushes import Push, Pushes
from dmltrain.kvstore.step import OptimizerStep, needs_pulled

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec
    from dmltrain.kvstore.server.flat import FlatSlice
    from dmltrain.kvstore.server.work import Former, Work


@dataclass(frozen=True)
class Arrival:
    """Times of a worker's last push that the value contains, in seconds of this process's monotonic clock."""

    since: float  # the push arrived
    behind: float  # s from when this worker was ready until the last worker of the round was
    complete: float  # all pushes of the round had arrived
    applied: float  # the value contained the push


@dataclass(eq=False)
class ServerSlice:
    """One slice of a key."""

    dtype: str
    length: int
    pushes: Pushes
    is_weight: bool  # an optimizer may change it; False: always the sum of a round
    codec: Codec | None  # of pushes
    result_codec: Codec | None  # of values that are pulled: sums of all workers
    allocate: Allocate
    factor: float = 1.0  # of a round's sum; 1 / workers for a mean
    value: Buffer = field(init=False)
    seen: dict[int, int] = field(default_factory=dict)  # steps at each worker's last pull
    pulled: dict[int, Buffer] = field(default_factory=dict)  # the value of each worker's last pull, if steps need it
    coded: Buffer | None = None  # the value as it is sent, if encoded
    residual: Array | None = None  # of result_codec
    spare: dict[str, list[Buffer]] = field(default_factory=lambda: {kind: [] for kind in ("push", "value", "coded")})
    arrived: dict[int, Arrival] = field(default_factory=dict)  # by worker
    initial: bool = True
    pusher: int = -1  # the only worker that pushes; -1: all do
    previous: Buffer | None = None  # the value of the round before, if only one worker pushes
    steps: int = 0  # optimizer steps, for the reported staleness
    can_roll_back: bool = False  # its last step can be taken back: see rollback.py
    former: Former | None = None  # if so, and it has made one
    waiting: list[tuple[int, int, float]] = field(default_factory=list)  # pulls: worker, clock, since when (s)
    priority: int = 0  # of its last pull
    step: OptimizerStep | None = None
    work: Work | None = None
    flat: FlatSlice | None = None  # while the slice is pushed and pulled in it: it has this slice's state
    retired: Callable[[Buffer], None] | None = None  # gets its free buffers once the slice is forgotten

    def __post_init__(self) -> None:
        self.value = self.take("value")
        self.value.array[:] = 0

    def reserve(self) -> None:
        """Allocate a second buffer for values."""
        self.spare["value"].append(self._new("value"))

    @property
    def push_bytes(self) -> int:
        return self.codec.nbytes(self.length) if self.codec else self.length * np.dtype(self.dtype).itemsize

    @property
    def encodes(self) -> bool:
        """Whether values are sent encoded: sums are; weights are if the codec needs no residual."""
        return self.result_codec is not None and (self.step is None or not self.result_codec.needs_residual)

    def take_for_push(self) -> Buffer:
        return self.take("push" if self.codec else "value")

    def borrowed(self, data: Array, kind: str) -> Buffer:
        """A push in `data` (uint8), memory that does not belong to this slice."""
        return Buffer(data if self.codec else data.view(self.dtype), kind)

    def target(self, pushes: list[Push]) -> Buffer:
        """The buffer for the sum of `pushes`: that of one of the first two, else a free one."""
        if self.codec is None:
            for push in pushes[:2]:
                if push.data.kind == "value":
                    return push.data
        return self.take("value")

    def take(self, kind: str) -> Buffer:
        """A free buffer of a kind, the one at the lowest offset, so that the buffers of a key's slices are contiguous.
        Those for "value" and "coded" are shared if possible."""
        free = self.spare[kind]
        if len(free) == 1:
            return free.pop()
        if free:
            return free.pop(min(range(len(free)), key=lambda number: free[number].offset or 0))
        return self._new(kind)

    def _new(self, kind: str) -> Buffer:
        if kind == "push":
            offset, memory = private(self.push_bytes)
        elif kind == "coded" and self.result_codec:
            offset, memory = self.allocate(self.result_codec.nbytes(self.length))
        else:
            offset, memory = self.allocate(self.length * np.dtype(self.dtype).itemsize)
        return Buffer(memory.view(self.dtype) if kind == "value" else memory, kind, offset, of=self)

    def named(self, key: int, index: int) -> tuple[int, int]:
        """The key and slice that messages name."""
        return key, index

    @property
    def is_changing(self) -> bool:
        """Whether its value is being changed in place."""
        return self.work is not None and self.work.target is self.value

    @property
    def members(self) -> Sequence[ServerSlice]:
        """The slices whose state this is: itself."""
        return (self,)

    def part(self, member: ServerSlice) -> Array:
        """The value of a slice whose state this is: its own."""
        return self.value.array

    def behind(self, worker: int) -> int:
        """How many steps were made since the worker's last pull."""
        return self.steps - self.seen.get(worker, 0)

    def set_step(self, step: OptimizerStep, workers: Iterable[int]) -> None:
        """From now on rounds, or pushes, make this step. All workers have the current value."""
        for buffer in self.pulled.values():
            self.release(buffer)
        self.pulled.clear()
        self.step, self.residual = step, None
        self.note_pull(*workers)

    def note_pull(self, *workers: int) -> None:
        """These workers have the current value. If steps need the values that workers pulled, it is kept until their
        next pull."""
        if not needs_pulled(self.step):
            return
        for worker in workers:
            before, self.pulled[worker] = self.pulled.get(worker), self.value
            self.value.readers += 1
            if before:
                self.release(before)

    def keep_previous(self, value: Buffer) -> None:
        """Keep `value`, of the round before, for pulls at its clock. One earlier value is enough: each worker pushes
        its own key, then pulls the keys of the others, and needs all of these before its next push. So a pusher is at
        most one round ahead of any pull."""
        before, self.previous = self.previous, value
        value.readers += 1
        if before:
            self.release(before)

    def keep_last_step(self, former: Former | None) -> None:
        """Keep what was before the last step; forget what was before an earlier one."""
        before, self.former = self.former, former
        if former:
            former.value.readers += 1
        if before:
            self.release(before.value)

    def at(self, clock: int) -> Buffer:
        """The value for a pull at `clock`, whose round is complete: the present value, or, if only one worker pushes,
        the value of that round."""
        exact = self.pusher >= 0 and clock == self.pushes.completed - 1
        return self.previous if exact and self.previous else self.value

    def release(self, buffer: Buffer) -> None:
        """A reply no longer reads this buffer."""
        buffer.readers -= 1
        self.give_back(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """Free a buffer, unless it is still in use."""
        if buffer.kind not in self.spare or buffer.readers:
            return
        if self.retired:
            self.retired(buffer)
        elif buffer is not self.value and buffer is not self.coded:
            self.spare[buffer.kind].append(buffer)

    @property
    def is_settled(self) -> bool:
        """Whether its pushes are settled, and no pull waits."""
        return self.pushes.are_settled and not (self.work or self.waiting)

    # -- changes of the job's members ------------------------------------------------------------------------------

    def restart(self, workers: Sequence[int], keeps_residual: bool = False) -> None:
        """Begin again with the pushes of these workers (`Pushes.restart`). Pulls that wait are forgotten. The value and
        its readers stay. The residual begins at zero, because the last round may have been aborted; with
        `keeps_residual` there was none, and it stays: it may be that of a checkpoint. No work may be in progress."""
        assert self.work is None
        if self.residual is not None and not keeps_residual:
            self.residual[:] = 0
        self.waiting.clear()
        for push in self.pushes.restart(workers, self.step is not None):
            self.give_back(push.data)
        if self.pushes.at_once:
            self.note_pull(*(worker for worker in workers if worker not in self.pulled))

    def forget_worker(self, worker: int) -> int:
        """Each push is a step, and this worker pushes no longer. Returns how many of its pushes the value contains."""
        self.seen.pop(worker, None)
        self.arrived.pop(worker, None)
        if before := self.pulled.pop(worker, None):
            self.release(before)
        return self.pushes.applied.pop(worker)

    def retire(self, take: Callable[[Buffer], None]) -> None:
        """The slice is forgotten. `take` gets its free buffers now, and the others when they are given back or
        released."""
        self.restart(())
        self.retired = take
        for buffer in [self.value, self.coded, *(buffer for free in self.spare.values() for buffer in free)]:
            if buffer:
                self.give_back(buffer)
        if self.previous:
            self.release(self.previous)
        self.keep_last_step(None)
