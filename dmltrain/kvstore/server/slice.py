"""A slice on its server, and the work that changes it. Pure: numpy, no threads.

Work. A `Work` is arithmetic: adding gradients, an optimizer's step, encoding the result. core.py creates it when its
inputs are complete, a thread of the service runs it (`Work.run`) without a lock, and core.py stores the result
(`ServerCore.done`). A slice has at most one work at a time.

Buffers. A value is never written while it is being read. So a sum goes into a buffer without readers, and a step on a
value that has readers writes its result to a new buffer. If no worker lags, two buffers take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server import summing
from dmltrain.kvstore.server.memory import Allocate, Buffer, private
from dmltrain.kvstore.step import OptimizerStep, needs_pulled

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec
    from dmltrain.kvstore.server.flat import FlatSlice


@dataclass(eq=False, slots=True)
class Push:
    """One worker's gradient that has arrived and is not yet in the value."""

    worker: int
    covers: tuple[int, ...]  # the workers whose sum it is: one, or all of a host
    clock: int
    rate: float
    data: Buffer
    since: float  # when it arrived, s
    ready: float  # when its worker had computed it, s; too late by the delay of the wire, which is not known


@dataclass(frozen=True, eq=False)
class Former:
    """A slice before its last step: the value, and copies of the optimizer's arrays."""

    value: Buffer
    state: dict[str, Array]


@dataclass(frozen=True)
class Arrival:
    """Times of a worker's last push that the value contains, in seconds of this process's monotonic clock."""

    since: float  # the push arrived
    behind: float  # s from when this worker was ready until the last worker of the round was
    complete: float  # all pushes of the round had arrived
    applied: float  # the value contained the push


@dataclass(eq=False)
class ServerSlice:
    """One slice of a key. `clocks`: how many pushes of each worker have arrived; `applied`: how many the value
    contains."""

    dtype: str
    length: int
    at_once: bool  # each push is a step
    is_weight: bool  # an optimizer may change it; False: always the sum of a round
    codec: Codec | None  # of pushes
    result_codec: Codec | None  # of values that are pulled: sums of all workers
    allocate: Allocate
    clocks: dict[int, int]
    applied: dict[int, int]
    factor: float = 1.0  # of a round's sum; 1 / workers for a mean
    value: Buffer = field(init=False)
    seen: dict[int, int] = field(default_factory=dict)  # steps at each worker's last pull
    pulled: dict[int, Buffer] = field(default_factory=dict)  # the value of each worker's last pull, if steps need it
    coded: Buffer | None = None  # the value as it is sent, if encoded
    residual: Array | None = None  # of result_codec
    spare: dict[str, list[Buffer]] = field(default_factory=lambda: {kind: [] for kind in ("push", "value", "coded")})
    arrived: dict[int, Arrival] = field(default_factory=dict)  # by worker
    initial: bool = True
    completed: int = 0  # rounds
    pusher: int = -1  # the only worker that pushes; -1: all do
    previous: Buffer | None = None  # the value of the round before, if only one worker pushes
    steps: int = 0  # optimizer steps, for the reported staleness
    can_roll_back: bool = False  # its last step can be taken back: see rollback.py
    former: Former | None = None  # if so, and it has made one
    rounds: dict[int, dict[int, Push]] = field(default_factory=dict)
    queue: deque[Push] = field(default_factory=deque)  # if each push is a step
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

    def lacks_only(self, covers: Sequence[int], clock: int) -> bool:
        """Whether a push at `clock`, of these workers' sum, completes the next round, and no work is in progress."""
        here = self.rounds.get(clock, {})
        if self.work is not None or clock != self.completed + 1 or covers[0] in here:
            return False
        return 0 < len(here) == len(self.clocks) - len(covers)

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

    def count_from(self, step: int) -> None:
        """All workers have pushed `step` times, and the value contains all these pushes."""
        self.completed = step
        self.clocks = dict.fromkeys(self.clocks, step)
        self.applied = dict(self.clocks)

    def at(self, clock: int) -> Buffer:
        """The value for a pull at `clock`, whose round is complete: the present value, or, if only one worker pushes,
        the value of that round."""
        exact = self.pusher >= 0 and clock == self.completed - 1
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
        """Whether each worker has pushed as often as all others, all of that is in the value, and no pull waits."""
        same = len({*self.clocks.values(), *self.applied.values()}) <= 1
        return same and not (self.work or self.rounds or self.queue or self.waiting)

    def step_at_once(self, at_once: bool) -> None:
        """From now on each push is a step (`at_once`), or each round is. Call this only while the slice `is_settled`,
        and has its own state."""
        self.at_once = at_once
        self.completed = max(self.clocks.values(), default=0)

    # -- changes of the job's members ------------------------------------------------------------------------------

    def restart(self, workers: Iterable[int], keeps_residual: bool = False) -> None:
        """Begin the rounds of these workers at clock 0, or, if an optimizer makes steps, at the clock of the last step.
        If each push is a step, workers that stay keep their clocks. Pushes and pulls that wait are forgotten. The value
        and its readers stay. The residual begins at zero, because the last round may have been aborted; with
        `keeps_residual` there was none, and it stays: it may be that of a checkpoint. No work may be in progress."""
        assert self.work is None
        if self.residual is not None and not keeps_residual:
            self.residual[:] = 0
        pending = {push: None for pushes in self.rounds.values() for push in pushes.values()}
        pending |= dict.fromkeys(self.queue)
        self.rounds.clear()
        self.queue.clear()
        self.waiting.clear()
        if self.at_once:
            self.applied = {worker: self.applied.get(worker, 0) for worker in workers}
            self.clocks = dict(self.applied)
            self.note_pull(*(worker for worker in self.applied if worker not in self.pulled))
        else:
            self.clocks = dict.fromkeys(workers, 0)
            self.count_from(0 if self.step is None else self.completed)
        for push in pending:
            self.give_back(push.data)

    def forget_worker(self, worker: int) -> int:
        """Each push is a step, and this worker pushes no longer. Returns how many of its pushes the value contains."""
        self.seen.pop(worker, None)
        self.arrived.pop(worker, None)
        if before := self.pulled.pop(worker, None):
            self.release(before)
        return self.applied.pop(worker)

    def holds(self, worker: int, step: int) -> None:
        """Each push is a step, and this worker holds its first `step` ones: nobody waits for these."""
        self.applied[worker] = max(self.applied[worker], step)
        self.clocks[worker] = max(self.clocks[worker], step)

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


@dataclass(eq=False, slots=True)
class Work:
    """`run` computes the slice's next value from the pushes of `hosts`, in this order. ServerCore.done stores it."""

    id: tuple[int, int]  # key, slice
    slice: ServerSlice
    hosts: list[list[Push]]
    step: OptimizerStep | None
    target: Buffer  # the next value; the current one if a step can be made in place
    coded: Buffer | None  # the next value as it is sent, if encoded
    scratch: Buffer | None  # for a step's gradient, unless that is one push as it arrived
    pulled: Buffer | None  # the value that the last push's worker had pulled, if the step needs it
    began: float  # when the last push had arrived, s
    former: Former | None = None  # what was before the step, if it may be taken back

    @property
    def pushes(self) -> list[Push]:
        return [push for host in self.hosts for push in host]

    @property
    def lent_bytes(self) -> int:
        """Bytes to be read from the workers' shared memory."""
        return sum(push.data.nbytes for push in self.pushes if push.data.kind == "lent")

    def run(self) -> None:
        slice_ = self.slice
        if self.step is None:
            self._sum(self.target.array, slice_.factor)
        else:
            self._step(self.step)
        if self.coded is not None:
            assert slice_.result_codec is not None
            slice_.result_codec.encode(self.target.array, self.coded.array, slice_.residual)

    def _sum(self, out: Array, factor: float = 1.0) -> Array:
        if codec := self.slice.codec:  # a host's sum is encoded with the codec for its number of workers
            encoded = [(codec.of_sum(len(push.covers)), push.data.array) for push in self.pushes]
            summing.total_of_coded(encoded, out)
        else:
            summing.total([[push.data.array for push in host] for host in self.hosts], out, factor)
        return out

    def _step(self, step: OptimizerStep) -> None:
        pushes = self.pushes
        gradient = pushes[0].data.array if self.scratch is None else self._sum(self.scratch.array)
        if self.target is not self.slice.value:
            np.copyto(self.target.array, self.slice.value.array)
        if self.slice.can_roll_back:
            state = {name: np.array(array) for name, array in step.state().items()}
            self.former = Former(self.slice.value, state)
        more = (self.pulled.array,) if self.pulled else ()
        step(self.target.array, gradient, pushes[-1].rate, *more)
