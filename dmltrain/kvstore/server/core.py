"""The decisions of one server: which actions follow from each push and pull. Pure (arrays in, actions out): service.py
does the I/O and runs the work.

Theory of operation. A server holds slices of keys. Every worker numbers its pushes of a slice 1, 2, ...: its clock.
One rule covers all kvstores: a pull at clock c is answered once the slowest worker's clock (finished workers do not
count) is at least c - staleness. A staleness of 0 is synchronous, infinity is asynchronous, and values between them are
bounded staleness (SSP; Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", section 3).

- Rounds (synchronous): a round is a set of workers, never a count of messages, so a repeated push counts once. When all
  workers have pushed, the server adds the gradients of each host in the order of the workers' ranks, then adds the
  hosts' sums in order. So the sum depends neither on the order of arrival, nor on the slices' distribution over
  servers, nor on whether a host's relay (relay.py) sends one sum for its workers. The value becomes the sum, or the
  optimizer makes one step with it.
- Immediate (asynchronous, SSP): each push is one optimizer step.

- Flat slices (synchronous): a worker may push and pull several small slices as one; flat.py has that. What concerns one
  of them alone waits for the end of their present round, and ends their common state first.

- Changes of the kvstore between two steps of all workers: `Keys.change` (worker/changes.py).

- Changes of the members of an elastic job, and of its kvstore: views.py.

For a complete round, or a push that is a step, the actions contain a `Work` (work.py). The caller runs it without a
lock and calls `done`. A reply is released when its value has been sent or, in shared memory, when the worker has read
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.keys import Keys
from dmltrain.kvstore.server.memory import Allocate, Buffer, Memory, private
from dmltrain.kvstore.server.pulls import Pulls
from dmltrain.kvstore.server.pushes import MAX_LAG, Push
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.slice import Arrival, ServerSlice
from dmltrain.kvstore.server.stragglers import Stragglers
from dmltrain.kvstore.server.views import Views
from dmltrain.kvstore.server.work import Work
from dmltrain.kvstore.server.workers import Workers
from dmltrain.kvstore.step import MakeStep
from dmltrain.kvstore.transport.wire import DTYPES


class ServerCore:
    """All `num_workers` workers of the job push here, unless `on_hosts` of `workers` selects some; in an elastic job
    these are the ranks that workers can have. Workers are identified by rank, the relay of a host by `relay_number`.
    A round or a pull waits at most `wait_seconds`; `allocate` gives memory for values; for `make_step` see Keys."""

    def __init__(
        self,
        num_workers: int,
        make_step: MakeStep | None = None,
        wait_seconds: float = 600.0,
        allocate: Allocate = private,
    ) -> None:
        self.workers = Workers(num_workers, tuple((worker,) for worker in range(num_workers)))
        self.keys = Keys(self.workers, Memory(allocate), make_step)
        self.flats = self.keys.flats
        self._pulls = Pulls(self.keys.declared, self.workers)
        self._stragglers = Stragglers(self.workers, wait_seconds)
        self.views = Views(self.keys, self._pulls, self._stragglers)
        self._pauses = 0  # pauses in force; while there is one, no new work begins; see `pause`

    def backlog(self, key: int, index: int) -> int:
        """The number of pushes of a slice that wait for their step."""
        return len(self.keys.find(key, index).pushes.queue)

    def pause(self) -> bool:
        """Begin no new work until `resume`, so that the server becomes quiescent. This is needed only in an elastic job
        in which each push is a step: there the workers never all wait at once, so work would never end. Several pauses
        may be in force. False in other jobs: there new work may still begin."""
        pauses = self.keys.elastic and not self.keys.declared.synchronous
        self._pauses += pauses
        return pauses

    def resume(self, now: float = 0.0) -> list[Action]:
        """The end of a pause."""
        self._pauses -= 1
        return [action for id, slice_ in self.keys.slices.items() for action in self._next(id, slice_, now)]

    @property
    def quiescent(self) -> bool:
        """Whether no work is in progress."""
        return all((slice_.flat or slice_).work is None for slice_ in self.keys.slices.values())

    def slices(self) -> dict[tuple[int, int], ServerSlice]:
        """(key, slice) -> ServerSlice, for reading and writing optimizer states, while no work is in progress."""
        self.flats.end_idle()
        return self.keys.slices

    # -- pushes and pulls -----------------------------------------------------------------------------------------

    def buffer(self, worker: int, key: int, index: int, nbytes: int, dtype: int, initial: bool = False) -> Buffer:
        """Memory for one worker's push of a slice, or for its initial value, which is not encoded. Raises Rejected if
        the size or type is wrong."""
        slice_ = self._check_push(worker, key, index, nbytes, dtype, initial)
        if initial:
            return slice_.take("value")
        return slice_.take_for_push()

    def lend(self, worker: int, key: int, index: int, data: Array, dtype: int) -> Buffer:
        """A Buffer for a push in the worker's shared memory, `data` (uint8). Raises Rejected like `buffer`."""
        slice_ = self._check_push(worker, key, index, data.nbytes, dtype, False)
        return slice_.borrowed(data, "lent")

    def completing_buffer(
        self, worker: int, key: int, index: int, nbytes: int, dtype: int, clock: int, memory: Callable[[int], Array]
    ) -> Buffer | None:
        """A Buffer in the receiving thread's `memory` (bytes -> uint8), for a push that completes the next round: the
        thread adds it before it receives another push. None for any other push. Raises Rejected like `buffer`."""
        slice_ = self._check_push(worker, key, index, nbytes, dtype, False)
        if slice_.work is not None or not slice_.pushes.lacks_only(self.workers.covers[worker], clock):
            return None
        return slice_.borrowed(memory(nbytes), "completing")

    def push(
        self,
        worker: int,
        key: int,
        index: int,
        clock: int,
        rate: float,
        data: Buffer,
        now: float = 0.0,
        age: float = 0.0,
    ) -> list[Action]:
        """Add a push at `clock` that was ready `age` seconds ago: a worker's gradient, or a relay's sum. Returns the
        actions that are now possible. Raises Rejected."""
        slice_ = self.keys.find(key, index)
        push = Push(worker, self.workers.covers[worker], clock, rate, data, now, now - age)
        add = partial(self._add, slice_, key, index, push)
        if not isinstance(slice_, FlatSlice):
            return self.flats.alone(slice_, add)
        if slice_.later:
            slice_.later.append(partial(self.push, worker, key, index, clock, rate, data, now, age))
            return []
        if slice_.apart:
            self.flats.begin(slice_)
        if not slice_.apart:
            return add()
        parts = zip(slice_.ids, slice_.divided(data), strict=True)
        return [action for id, part in parts for action in self.push(worker, *id, clock, rate, part, now, age)]

    def _add(self, slice_: ServerSlice, key: int, index: int, push: Push) -> list[Action]:
        covers, clock, pushes, named = push.covers, push.clock, slice_.pushes, slice_.named(key, index)
        if not math.isfinite(push.rate):
            raise Rejected(
                f"worker {covers[0]} sent the learning rate {push.rate} with {self.keys.declared.describe(*named)}, "
                "expected a finite number: look at how that worker computes it"
            )
        if not pushes.clocks.keys() >= set(covers):
            raise Rejected(
                f"worker {covers[0]} pushes {self.keys.declared.describe(*named)}, which only worker "
                f"{min(pushes.clocks)} may push"
            )
        clocks = {pushes.clocks[cover] for cover in covers}
        if clock <= min(clocks):  # a repeated push counts once
            slice_.give_back(push.data)
            return []
        if clocks != {clock - 1} and not (self.keys.elastic and pushes.at_once):
            raise Rejected(
                f"worker {covers[0]} pushes key {named[0]} slice {named[1]} at clock {clock}, "
                f"expected {max(clocks) + 1}: a push is missing"
            )
        if not pushes.at_once and clock - pushes.completed > MAX_LAG:
            raise Rejected(
                f"worker {push.worker} has pushed key {named[0]} {MAX_LAG} times more often than other workers, or "
                f"faster than this server can sum: pull it at least once in {MAX_LAG} pushes"
            )
        if slice_.step is not None:
            self.views.kept.clear()  # a worker pushes only when all servers have the states of their slices
        pushes.add(push)
        return self._next((key, index), slice_, push.since)

    def done(self, work: Work, now: float = 0.0, waited: float = 0.0, worked: float | None = None) -> list[Action]:
        """The work has run: store its value, answer the pulls that waited for it, start the slice's next work.

        In a relay, `waited` is how long the value waited for workers of other hosts, and `worked` how long all work on
        it took, in seconds. The rest of the time it was on the wire.
        """
        slice_ = work.slice
        before, slice_.work = (slice_.value, slice_.coded), None
        if slice_.pusher >= 0:
            slice_.keep_previous(slice_.value)
        if slice_.can_roll_back:
            slice_.keep_last_step(work.former)
        slice_.value, slice_.coded = work.target, work.coded
        pushes = work.pushes
        ready = max(push.ready for push in pushes)
        complete = work.began if worked is None else now - worked
        slice_.pushes.apply(pushes)
        for push in pushes:
            slice_.arrived[push.worker] = Arrival(push.since, ready - push.ready + waited, complete, now)
            slice_.give_back(push.data)
        if slice_.step is not None:
            slice_.steps += 1
        for buffer in (*before, work.scratch):
            if buffer is not None:
                slice_.give_back(buffer)
        if work.pulled is not None:
            slice_.release(work.pulled)
        actions = self._pulls.answer(*work.id, slice_, now)
        actions += self.flats.gatherings.offer(slice_.members)
        actions += self._next(work.id, slice_, now)
        return actions + self.flats.go_on(slice_)

    def pull(self, worker: int, key: int, index: int, clock: int, now: float = 0.0, priority: int = 0) -> list[Action]:
        """A worker's pull at `clock`: answered now, or by a later `done` or `finish`. Raises Rejected."""
        slice_ = self.keys.find(key, index)
        return self.flats.alone(slice_, partial(self._pull, slice_, worker, key, index, clock, now, priority))

    def _pull(
        self, slice_: ServerSlice, worker: int, key: int, index: int, clock: int, now: float, priority: int
    ) -> list[Action]:
        self._pulls.check(worker, key, index, slice_)
        if isinstance(slice_, FlatSlice) and slice_.apart:
            return list(self.flats.gatherings.begin(slice_, worker, clock, priority))
        slice_.waiting.append((worker, clock, now))
        slice_.priority = priority
        return self._pulls.answer(key, index, slice_, now)

    def finish(self, worker: int, now: float = 0.0) -> list[Action]:
        """A worker, or relay, has finished. From now on pulls do not wait for this worker's clock."""
        if not self.workers.finish(worker):
            return []
        return [reply for id, slice_ in self.keys.slices.items() for reply in self._pulls.answer(*id, slice_, now)]

    def overdue(self, now: float) -> str:
        """The straggler diagnosis of all slices; see Stragglers."""
        alone = {id: slice_ for id, slice_ in self.keys.slices.items() if slice_.flat is None}
        together = {flat.ids[0]: flat for flat in self.flats.together}
        named = [(self.keys.declared.describe(*id), slice_) for id, slice_ in (alone | together).items()]
        return self._stragglers.overdue(named, self.keys.declared.staleness, now)

    # -- internal -------------------------------------------------------------------------------------------------

    def _check_push(self, worker: int, key: int, index: int, nbytes: int, dtype: int, initial: bool) -> ServerSlice:
        slice_ = self.keys.find(key, index)
        coded = slice_.codec is not None and not initial
        size = slice_.push_bytes if coded else slice_.length * np.dtype(slice_.dtype).itemsize
        expected = slice_.codec.number if coded and slice_.codec else DTYPES.index(slice_.dtype)
        if dtype != expected or nbytes != size:
            raise Rejected(
                f"worker {worker} sent {nbytes} bytes of {_type(dtype)} for key {key} slice {index}, "
                f"expected {size} bytes of {_type(expected)}"
            )
        return slice_

    def _next(self, id: tuple[int, int], slice_: ServerSlice, now: float) -> list[Action]:
        """The slice's next work, if none is in progress and its pushes have arrived."""
        if slice_.work is not None or self._pauses:
            return []
        hosts = slice_.pushes.take_next(self.workers.hosts)
        if not hosts:
            return []
        slice_.work = self._work(id, slice_, hosts, now)
        return [slice_.work]

    def _work(self, id: tuple[int, int], slice_: ServerSlice, hosts: list[list[Push]], now: float) -> Work:
        scratch, target = None, slice_.value
        pushes = [push for host in hosts for push in host]
        if slice_.step is None:
            if slice_.pushes.at_once:
                raise Rejected(
                    f"kvstore {self.keys.declared.type_name} runs the optimizer on the servers, "
                    "but none was set: call set_optimizer before the first push"
                )
            target = slice_.target(pushes)
        else:
            if len(pushes) > 1 or slice_.codec or pushes[0].data.kind == "lent":  # steps may change their gradient
                scratch = slice_.take("value")
            if slice_.value.readers or slice_.can_roll_back:  # it is being sent or read, or kept: step on a copy
                target = slice_.take("value")
        coded = slice_.take("coded") if slice_.encodes else None
        pulled = slice_.pulled.get(pushes[-1].worker)
        if pulled is not None:
            pulled.readers += 1
        return Work(id, slice_, hosts, slice_.step, target, coded, scratch, pulled, now)


def _type(dtype: int) -> str:
    return DTYPES[dtype] if dtype < len(DTYPES) else f"compression {dtype}"
