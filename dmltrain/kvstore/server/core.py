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

- Changes of the kvstore between two steps of all workers: `change` (worker/changes.py).

- Changes of the members of an elastic job: `enter`, and of its kvstore: `become`. Workers keep their ranks. If
  each round is a step of the optimizer here, the last step may be taken back: `hold`, rollback.py. If each push is a
  step, workers keep their clocks. Then a worker's clock may also jump, and a push that a worker repeats after the
  change counts once.

For a complete round, or a push that is a step, the actions contain a `Work` (slice.py). The caller runs it without a
lock and calls `done`. A reply is released when its value has been sent or, in shared memory, when the worker has read
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.server import rollback
from dmltrain.kvstore.server.declared import Declared, Rejected
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.flats import Flats
from dmltrain.kvstore.server.memory import Allocate, Buffer, Memory, private
from dmltrain.kvstore.server.reply import Action, Reply
from dmltrain.kvstore.server.slice import Arrival, Push, ServerSlice, Work
from dmltrain.kvstore.server.stragglers import Stragglers
from dmltrain.kvstore.server.workers import Workers
from dmltrain.kvstore.step import MakeStep, OptimizerStep, is_whole
from dmltrain.kvstore.transport.message import Declare, DeclaredKey
from dmltrain.kvstore.transport.wire import DTYPES

MAX_LAG = 64  # maximum of incomplete rounds of a slice
MAX_WAITING = 2 * MAX_LAG  # maximum of a worker's pulls of a slice that wait for their clock


@dataclass
class ServerCore:
    """`make_step`, from the backend, returns the function that makes an optimizer's step on one slice.

    All `num_workers` workers of the job push here, unless `on_hosts` selects some; in an elastic job these are the
    ranks that workers can have. Workers are identified by rank, the relay of a host by `relay_number`.
    """

    num_workers: int
    staleness: float = 0.0
    make_step: MakeStep | None = None
    wait_seconds: float = 600.0
    spec: dict[str, Any] | None = None
    allocate: Allocate = private  # memory for values
    _kept: dict[str, Array] = field(default_factory=dict)  # states of slices before they were divided anew
    _elastic: bool = False  # there are views
    gone: dict[int, tuple[int, int]] = field(default_factory=dict)  # see `enter`
    _pauses: int = 0  # pauses in force; while there is one, no new work begins; see `pause`
    _slices: dict[tuple[int, int], ServerSlice] = field(default_factory=dict)
    _declared: Declared = field(default_factory=Declared)
    workers: Workers = field(init=False)
    flats: Flats = field(init=False)
    _stragglers: Stragglers = field(init=False)
    _memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self._memory = Memory(self.allocate)
        self.flats = Flats(self._slices, self._declared, self._memory)
        self.on_hosts([(worker,) for worker in range(self.num_workers)])

    def on_hosts(self, hosts: Sequence[tuple[int, ...]]) -> None:
        """The ranks on each host, in the order in which hosts are added; call it before the first declaration."""
        self._set(Workers(self.num_workers, tuple(hosts)))

    def enter(self, hosts: Sequence[tuple[int, ...]], lost: Collection[int] = (), other_servers: bool = False) -> None:
        """Begin a view in which these workers push, from clock 0 on. `hosts`: their ranks by host, in the order in
        which hosts are added. `lost`: workers that were lost; those of them in `hosts` are replacements. Weights stay
        declared and keep their values. Other keys are forgotten; the memory of a value stays until the workers that
        still read it release it. With `other_servers`, slices are divided among other servers than before, so weights
        are forgotten as well. If each push is a step, `gone` gets for each worker that pushes no longer its lowest and
        its highest clock over all slices. No work may be in progress. Not for flat slices."""
        self._forget_workers(
            set(self.workers.ranks).difference(worker for host in hosts for worker in host) | set(lost)
        )
        self._set(self.workers.on_hosts(tuple(hosts), lost))
        is_first, self._elastic = not self._elastic, True
        if other_servers:
            self._kept |= rollback.states(self._slices, all_of_it=True)
        self._declared.forget(weights=other_servers)
        for (key, index), slice_ in list(self._slices.items()):
            if slice_.is_weight and not other_servers:
                slice_.restart(self.workers.ranks, keeps_residual=is_first)
                slice_.can_roll_back = not slice_.at_once
                slice_.factor = self._factor(self._declared.is_mean(key))
            else:
                del self._slices[key, index]
                slice_.retire(self._memory.give_back)

    def _forget_workers(self, workers: Collection[int]) -> None:
        at_once = [slice_ for slice_ in self._slices.values() if slice_.is_weight and slice_.at_once]
        for worker in workers:
            clocks = [slice_.forget_worker(worker) for slice_ in at_once if worker in slice_.applied]
            if not clocks:
                self.gone.pop(worker, None)
            elif max(clocks) or worker not in self.gone:  # else it is a new process that has made no step
                self.gone[worker] = min(clocks), max(clocks)

    @property
    def steps_at_once(self) -> bool:
        """Whether each push is a step."""
        return not self._declared.synchronous

    def hold(self, worker: int, step: int, now: float = 0.0) -> list[Action]:
        """A worker has entered a view and holds step `step` of the optimizer. All workers hold the same; if a slice has
        made the step after it, that one is taken back. A worker sends this before its first push. If each push is a
        step, `step` counts the worker's own steps: they all count as made, so nobody waits for one of them. Raises
        Rejected. No work may be in progress, unless each push is a step."""
        weights = {id: slice_ for id, slice_ in self._slices.items() if slice_.is_weight}
        if self.steps_at_once:
            for slice_ in weights.values():
                slice_.holds(worker, step)
            return [
                reply for (key, index), weight in weights.items() for reply in self._answer(key, index, weight, now)
            ]
        for id, slice_ in weights.items():
            try:
                rollback.go_back_to(slice_, step)
            except rollback.CannotGoBack as error:
                raise Rejected(f"{self._declared.describe(*id)} {error}") from error
        return []

    def states(self) -> dict[str, Array]:
        """This server's optimizer states: see rollback.states. After a change of servers, until the first push, also
        the states that it had before."""
        return self._kept | rollback.states(self._slices, all_of_it=False)

    def change(self, kv_store: str, staleness: float) -> KVStoreKind:
        """The kvstore changes between two steps of all workers; see message.Change. Returns its kind from now on.
        Raises Rejected if a worker is ahead of another, or waits."""
        kind = self._declared.kind.changed(kv_store, staleness)
        self.flats.end_idle()
        for id, slice_ in self._slices.items():
            if slice_.is_weight and not slice_.is_settled:
                raise Rejected(
                    f"the kvstore changes to {kind.type.name} while {self._declared.describe(*id)} is in use: pushes "
                    f"of each worker {slice_.clocks}, of these used {slice_.applied}"
                )
        self.become(kind)
        return kind

    def become(self, kind: KVStoreKind) -> None:
        """The kvstore is of this kind from now on. Weights and the states of optimizers stay as they are. In a new view
        of an elastic job call this after `enter`. If it decides whether each push is a step, all workers must be
        between two steps, and hold the same number of them."""
        self._declared.change(kind)
        self.staleness, synchronous = kind.staleness, kind.type.synchronous
        for slice_ in self._slices.values():
            if slice_.is_weight and slice_.at_once == synchronous:
                slice_.step_at_once(not synchronous)
                if synchronous:
                    slice_.count_from(slice_.completed)
                slice_.can_roll_back = self._elastic and synchronous
                slice_.keep_last_step(None)
        if synchronous:
            self.gone.clear()

    def _set(self, workers: Workers) -> None:
        self.workers = workers
        self._stragglers = Stragglers(workers, self.wait_seconds)

    # -- keys and values ------------------------------------------------------------------------------------------

    def declare(self, worker: int, message: Declare) -> None:
        """A worker declares the kvstore's type and keys. All workers must declare the same. Raises Rejected."""
        self._declared.take(worker, message)
        self.staleness = message.staleness
        for entry in message.keys:
            ids = [(entry.key, index) for index, _ in entry.slices]
            if ids and ids[0] not in self._slices:
                self._slices |= {
                    id: self._new(entry, length) for id, (_, length) in zip(ids, entry.slices, strict=True)
                }
                for id in ids:  # after the first buffers of all slices, so that those of a key are contiguous
                    self._slices[id].reserve()
                    if _applies_to(self.spec, entry.key):
                        self._check_whole(self._slices[id].step, *id)

    def _new(self, entry: DeclaredKey, length: int) -> ServerSlice:
        codec = codecs.make(entry.compression)
        result = codec and codec.of_sum(self.num_workers)
        zeros = {worker: 0 for worker in self._pushers(entry)}
        at_once = entry.weight and not self._declared.synchronous
        slice_ = ServerSlice(
            entry.dtype,
            length,
            at_once,
            entry.weight,
            codec,
            result,
            self._memory.take,
            zeros,
            zeros.copy(),
            self._factor(entry.mean),
            pusher=entry.pusher,
            can_roll_back=self._elastic and not at_once,
        )
        if self.spec and self.make_step and slice_.is_weight:
            slice_.set_step(self.make_step(self.spec, entry.key, slice_.value.array), self.workers.ranks)
        if result and result.needs_residual and slice_.step is None:
            slice_.residual = np.zeros(length, np.float32)
        return slice_

    def _factor(self, mean: bool) -> float:
        """The factor of a round's sum."""
        return 1.0 / len(self.workers.ranks) if mean else 1.0

    def _pushers(self, entry: DeclaredKey) -> Sequence[int]:
        """The workers whose pushes make a round of the key. Raises Rejected."""
        if entry.pusher < 0:
            return self.workers.ranks
        if entry.pusher not in self.workers.ranks:
            raise Rejected(f"key {entry.key} is pushed by worker {entry.pusher}, which is not in this job")
        return (entry.pusher,)

    def initialise(self, worker: int, key: int, index: int, data: Array) -> None:
        """Set the initial value of a slice. For a weight a later call has no effect. For other keys it sets the value
        again: so a worker broadcasts values (worker/broadcast.py)."""
        slice_ = self._find(key, index)
        if isinstance(slice_, FlatSlice):
            raise Rejected(f"worker {worker} sends an initial value of a flat key")
        if slice_.initial or not slice_.is_weight:
            slice_.value.array[:] = data
            slice_.initial = False

    def optimize(self, spec: dict[str, Any]) -> None:
        """From now on each round (or push) of a weight makes a step of the optimizer `spec`. If `spec` has "keys", only
        these keys get it: the optimizer of another model stays. Raises Rejected."""
        if self.make_step is None:
            raise Rejected("this server has no optimizers")
        if not isinstance(spec.get("keys"), (dict, type(None))):
            raise Rejected(f'the optimizer\'s "keys" are {spec["keys"]!r}, expected an object of key numbers')
        make_step = self.make_step

        def renew(key: int, index: int, slice_: ServerSlice) -> list[Action]:
            step = make_step(spec, key, slice_.value.array)
            self._check_whole(step, key, index)
            slice_.set_step(step, self.workers.ranks)
            return []

        for (key, index), slice_ in self._slices.items():
            if slice_.is_weight and _applies_to(spec, key):
                self.flats.alone(slice_, partial(renew, key, index, slice_))
        self.spec = spec

    def backlog(self, key: int, index: int) -> int:
        """The number of pushes of a slice that wait for their step."""
        return len(self._find(key, index).queue)

    def pause(self) -> bool:
        """Begin no new work until `resume`, so that the server becomes quiescent. This is needed only in an elastic job
        in which each push is a step: there the workers never all wait at once, so work would never end. Several pauses
        may be in force. False in other jobs: there new work may still begin."""
        pauses = self._elastic and self.steps_at_once
        self._pauses += pauses
        return pauses

    def resume(self, now: float = 0.0) -> list[Action]:
        """The end of a pause."""
        self._pauses -= 1
        return [
            action for (key, index), slice_ in self._slices.items() for action in self._next(key, index, slice_, now)
        ]

    @property
    def quiescent(self) -> bool:
        """Whether no work is in progress."""
        return all((slice_.flat or slice_).work is None for slice_ in self._slices.values())

    def slices(self) -> dict[tuple[int, int], ServerSlice]:
        """(key, slice) -> ServerSlice, for reading and writing optimizer states, while no work is in progress."""
        self.flats.end_idle()
        return self._slices

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
        if not slice_.lacks_only(self.workers.covers[worker], clock):
            return None
        return slice_.borrowed(memory(nbytes), "completing")

    def give_back(self, data: Buffer) -> None:
        """Return a buffer from `buffer`. Its slice may have been forgotten since."""
        if data.of:
            data.of.give_back(data)

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
        slice_ = self._find(key, index)
        push = partial(self._push, slice_, worker, key, index, clock, rate, data, now, age)
        if not isinstance(slice_, FlatSlice):
            return self.flats.alone(slice_, push)
        if slice_.later:
            slice_.later.append(partial(self.push, worker, key, index, clock, rate, data, now, age))
            return []
        if slice_.apart:
            self.flats.begin(slice_)
        if not slice_.apart:
            return push()
        parts = zip(slice_.ids, slice_.divided(data), strict=True)
        return [action for id, part in parts for action in self.push(worker, *id, clock, rate, part, now, age)]

    def _push(
        self,
        slice_: ServerSlice,
        worker: int,
        key: int,
        index: int,
        clock: int,
        rate: float,
        data: Buffer,
        now: float,
        age: float,
    ) -> list[Action]:
        covers, named = self.workers.covers[worker], slice_.named(key, index)
        if not math.isfinite(rate):
            raise Rejected(
                f"worker {covers[0]} sent the learning rate {rate} with {self._declared.describe(*named)}, "
                "expected a finite number: look at how that worker computes it"
            )
        if not slice_.clocks.keys() >= set(covers):
            raise Rejected(
                f"worker {covers[0]} pushes {self._declared.describe(*named)}, which only worker "
                f"{min(slice_.clocks)} may push"
            )
        clocks = {slice_.clocks[cover] for cover in covers}
        if clock <= min(clocks):  # a repeated push counts once
            slice_.give_back(data)
            return []
        if clocks != {clock - 1} and not (self._elastic and slice_.at_once):
            raise Rejected(
                f"worker {covers[0]} pushes key {named[0]} slice {named[1]} at clock {clock}, "
                f"expected {max(clocks) + 1}: a push is missing"
            )
        if not slice_.at_once and clock - slice_.completed > MAX_LAG:
            raise Rejected(
                f"worker {worker} has pushed key {named[0]} {MAX_LAG} times more often than other workers, or faster "
                f"than this server can sum: pull it at least once in {MAX_LAG} pushes"
            )
        if slice_.step is not None:
            self._kept.clear()  # a worker pushes only when all servers have the states of their slices
        slice_.clocks |= dict.fromkeys(covers, clock)
        push = Push(worker, covers, clock, rate, data, now, now - age)
        if slice_.at_once:
            slice_.queue.append(push)
        else:
            slice_.rounds.setdefault(clock, {}).update(dict.fromkeys(covers, push))
        return self._next(key, index, slice_, now)

    def done(self, work: Work, now: float = 0.0, waited: float = 0.0, worked: float | None = None) -> list[Action]:
        """The work has run: store its value, answer the pulls that waited for it, start the slice's next work.

        In a relay, `waited` is how long the value waited for workers of other hosts, and `worked` how long all work on
        it took, in seconds. The rest of the time it was on the wire.
        """
        slice_, (key, index) = work.slice, work.id
        before, slice_.work = (slice_.value, slice_.coded), None
        if slice_.pusher >= 0:
            slice_.keep_previous(slice_.value)
        if slice_.can_roll_back:
            slice_.keep_last_step(work.former)
        slice_.value, slice_.coded = work.target, work.coded
        ready = max(push.ready for push in work.pushes)
        complete = work.began if worked is None else now - worked
        for push in work.pushes:
            slice_.applied |= dict.fromkeys(push.covers, push.clock)
            slice_.arrived[push.worker] = Arrival(push.since, ready - push.ready + waited, complete, now)
            slice_.give_back(push.data)
        if not slice_.at_once:
            slice_.completed += 1
        if slice_.step is not None:
            slice_.steps += 1
        for buffer in (*before, work.scratch):
            if buffer is not None:
                slice_.give_back(buffer)
        if work.pulled is not None:
            slice_.release(work.pulled)
        actions = self._answer(key, index, slice_, now)
        actions += self.flats.gatherings.offer(slice_.members)
        actions += self._next(key, index, slice_, now)
        return actions + self.flats.go_on(slice_)

    def pull(self, worker: int, key: int, index: int, clock: int, now: float = 0.0, priority: int = 0) -> list[Action]:
        """A worker's pull at `clock`: answered now, or by a later `done` or `finish`. Raises Rejected."""
        slice_ = self._find(key, index)
        return self.flats.alone(slice_, partial(self._pull, slice_, worker, key, index, clock, now, priority))

    def _pull(
        self, slice_: ServerSlice, worker: int, key: int, index: int, clock: int, now: float, priority: int
    ) -> list[Action]:
        pulls = [rank for rank, _, _ in slice_.waiting]
        if isinstance(slice_, FlatSlice) and slice_.apart:
            pulls = [gathering.worker for gathering in slice_.gatherings]
        if len(pulls) >= MAX_WAITING and pulls.count(worker) >= MAX_WAITING:
            named = slice_.named(key, index)
            raise Rejected(
                f"worker {worker} has {MAX_WAITING} pulls of key {named[0]} slice {named[1]} that wait for other "
                f"workers: wait for at least one in {MAX_WAITING}"
            )
        if isinstance(slice_, FlatSlice) and slice_.apart:
            return list(self.flats.gatherings.begin(slice_, worker, clock, priority))
        slice_.waiting.append((worker, clock, now))
        slice_.priority = priority
        return self._answer(key, index, slice_, now)

    def finish(self, worker: int, now: float = 0.0) -> list[Action]:
        """A worker, or relay, has finished. From now on pulls do not wait for this worker's clock."""
        if not self.workers.finish(worker):
            return []
        return [
            reply for (key, index), slice_ in self._slices.items() for reply in self._answer(key, index, slice_, now)
        ]

    def overdue(self, now: float) -> str:
        """The straggler diagnosis of all slices; see Stragglers."""
        alone = {id: slice_ for id, slice_ in self._slices.items() if slice_.flat is None}
        together = {flat.ids[0]: flat for flat in self.flats.together}
        named = [(self._declared.describe(*id), slice_) for id, slice_ in (alone | together).items()]
        return self._stragglers.overdue(named, self.staleness, now)

    # -- internal -------------------------------------------------------------------------------------------------

    def _check_whole(self, step: OptimizerStep | None, key: int, index: int) -> None:
        """Raises Rejected if the step needs a whole key, and this key is divided."""
        if is_whole(step) and not self._declared.is_whole(key):
            raise Rejected(
                f"this optimizer needs whole keys, because it takes norms: {self._declared.describe(key, index)} is "
                "a part of one; call init with whole=True"
            )

    def _find(self, key: int, index: int) -> ServerSlice:
        slice_ = self._slices.get((key, index)) or self.flats.find(key)
        if slice_ is None:
            raise Rejected(f"key {key} slice {index} was not declared to this server")
        return slice_

    def _check_push(self, worker: int, key: int, index: int, nbytes: int, dtype: int, initial: bool) -> ServerSlice:
        slice_ = self._find(key, index)
        coded = slice_.codec is not None and not initial
        size = slice_.push_bytes if coded else slice_.length * np.dtype(slice_.dtype).itemsize
        expected = slice_.codec.number if coded and slice_.codec else DTYPES.index(slice_.dtype)
        if dtype != expected or nbytes != size:
            raise Rejected(
                f"worker {worker} sent {nbytes} bytes of {_type(dtype)} for key {key} slice {index}, "
                f"expected {size} bytes of {_type(expected)}"
            )
        return slice_

    def _next(self, key: int, index: int, slice_: ServerSlice, now: float) -> list[Action]:
        """The slice's next work, if none is in progress and its pushes have arrived."""
        if slice_.work is not None or self._pauses:
            return []
        if slice_.at_once:
            hosts = [[slice_.queue.popleft()]] if slice_.queue else []
        elif len(slice_.rounds.get(slice_.completed + 1, ())) == len(slice_.clocks):
            by_worker = slice_.rounds.pop(slice_.completed + 1)
            present = [[by_worker[worker] for worker in host if worker in by_worker] for host in self.workers.hosts]
            hosts = [list(dict.fromkeys(pushes)) for pushes in present if pushes]
        else:
            hosts = []
        if not hosts:
            return []
        slice_.work = self._work((key, index), slice_, hosts, now)
        return [slice_.work]

    def _work(self, id: tuple[int, int], slice_: ServerSlice, hosts: list[list[Push]], now: float) -> Work:
        scratch, target = None, slice_.value
        pushes = [push for host in hosts for push in host]
        if slice_.step is None:
            if slice_.at_once:
                raise Rejected(
                    f"kvstore {self._declared.type_name} runs the optimizer on the servers, "
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

    def _answer(self, key: int, index: int, slice_: ServerSlice, now: float) -> list[Action]:
        if not slice_.waiting or slice_.is_changing:
            return []  # no pull is waiting, or the value is being changed
        if not slice_.at_once:
            ready = [pull for pull in slice_.waiting if pull[1] <= slice_.completed]
            slice_.waiting = (
                []
                if len(ready) == len(slice_.waiting)
                else [pull for pull in slice_.waiting if pull[1] > slice_.completed]
            )
        else:
            finished = self.workers.finished
            running = [c for w, c in slice_.applied.items() if w not in finished]
            reached = min(running, default=math.inf) + self.staleness
            ready = []
            waiting: list[tuple[int, int, float]] = []
            for pull in slice_.waiting:  # a worker reads its own pushes: the value must contain them
                (ready if pull[1] <= min(reached, slice_.applied[pull[0]]) else waiting).append(pull)
            slice_.waiting = waiting
        return [self._reply(key, index, slice_, pull, now) for pull in ready]

    def _reply(self, key: int, index: int, slice_: ServerSlice, pull: tuple[int, int, float], now: float) -> Reply:
        worker, clock, asked = pull
        others = max(0, slice_.steps - slice_.seen.get(worker, 0) - 1)  # steps by others since this worker's last pull
        slice_.seen[worker] = slice_.steps
        waited = worked = 0.0
        if arrival := slice_.arrived.get(worker if slice_.pusher < 0 else slice_.pusher):
            if slice_.pusher >= 0:
                waited = max(0.0, arrival.since - asked)
            elif not slice_.at_once:
                waited, worked = arrival.behind, arrival.applied - arrival.complete
            else:  # each push is a step; a worker waits for others, if at all, after its own step
                waited = now - max(asked, arrival.applied) if self.staleness < math.inf else 0.0
                worked = now - max(asked, arrival.since) - waited
        buffer, dtype = slice_.at(clock), DTYPES.index(slice_.dtype)
        if slice_.coded is not None and slice_.result_codec is not None:
            buffer, dtype = slice_.coded, slice_.result_codec.number
        buffer.readers += 1
        slice_.note_pull(worker)
        return Reply(worker, key, index, clock, float(others), buffer, dtype, waited, worked, slice_.priority, slice_)


def _applies_to(spec: dict[str, Any] | None, key: int) -> bool:
    """Whether an optimizer is for a key: for all, or for those in its "keys"."""
    named = spec.get("keys") if spec else None
    return named is None or str(key) in named


def _type(dtype: int) -> str:
    return DTYPES[dtype] if dtype < len(DTYPES) else f"compression {dtype}"
