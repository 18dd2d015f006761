"""One server's decisions: what to do with each push and pull. Pure (arrays in, replies out); server_process.py moves
bytes.

Theory of operation. A server holds slices of keys. Every worker numbers its pushes of a slice 1, 2, ...: its clock.
One rule covers all kvstores: a pull at clock c is answered once the slowest worker's clock (of those that have not
finished) is at least c - staleness; 0 is synchronous, infinity asynchronous, between them bounded staleness (SSP; Ho
et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", section 3).

- Rounds (synchronous): a round is the set of workers whose push has come, never a count of messages, so a repeated push
  counts once. When the set is complete the gradients are added in the order of the workers' ranks: the sum does not
  depend on who came first, nor on how slices lie on servers. The value becomes the sum, or, with an optimizer, one
  step is made.
- At once (asynchronous, SSP): each push is one optimizer step.

Buffers. A push is received into a buffer that this module hands out (`buffer`), the sum is made in the first worker's
buffer, which then is the value: no copies. A value that is still being sent is never written: writers take a fresh
buffer (`Reply.release` ends the reading), so nobody pulls half of one round and half of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmltrain.kvstore.wire import DTYPES

Step = Callable[[np.ndarray, np.ndarray, float], None]  # (value, gradient, learning rate): changes value in place
MakeStep = Callable[[dict[str, Any], int, np.ndarray], Step]  # (spec, key, value)
MAX_LAG = 64  # rounds that wait for others in memory, at most


class Rejected(Exception):
    """A request that makes no sense; the message goes back to the worker, whose job ends with it."""


@dataclass(eq=False)
class Buffer:
    array: np.ndarray
    readers: int = 0  # replies that are still being sent from it


@dataclass(eq=False, frozen=True)
class Reply:
    """The value for `worker`'s pull of (key, slice) at clock `round`. Call ServerCore.release when it has been sent."""

    worker: int
    key: int
    slice: int
    round: int
    staleness: float
    buffer: Buffer


@dataclass(eq=False)
class _Slice:
    value: Buffer
    spare: list[Buffer]
    dtype: str
    is_weight: bool  # an optimizer may apply; False: always the plain sum of a round
    clocks: list[int]
    initial: bool = True
    completed: int = 0  # rounds
    steps: int = 0  # optimizer steps, for the staleness that is reported
    seen: list[int] = field(default_factory=list)  # steps at each worker's last pull
    rounds: dict[int, dict[int, Buffer]] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)  # round -> when its first push came, s
    waiting: list[tuple[int, int, float]] = field(default_factory=list)  # pulls: worker, clock, since when (s)
    step: Step | None = None


@dataclass
class ServerCore:
    """`make_step` returns the function that makes an optimizer's step on one slice (backends do that)."""

    num_workers: int
    staleness: float = 0.0
    make_step: MakeStep | None = None
    wait_seconds: float = 600.0
    spec: dict[str, Any] | None = None
    _slices: dict[tuple[int, int], _Slice] = field(default_factory=dict)
    _declared: dict[int, dict[str, Any]] = field(default_factory=dict)
    _mode: tuple[str, float] | None = None
    _finished: set[int] = field(default_factory=set)
    _absence: str = ""

    # -- what is stored -------------------------------------------------------------------------------------------

    def declare(self, worker: int, message: dict[str, Any]) -> None:
        """A worker announces the kvstore's type and keys: {"type", "staleness", "keys": [{"key", "name", "dtype",
        "weight", "slices": [[index, length], ...]}]}. All workers must announce the same. Raises Rejected."""
        try:
            mode = (str(message["type"]), float(message["staleness"]))
            keys = [self._check(entry) for entry in message["keys"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Rejected(f"malformed declaration: {error!r}") from error
        if self._mode not in (None, mode):
            raise Rejected(f"worker {worker} uses kvstore {mode[0]} (staleness {mode[1]:g}), the others "
                           f"{self._mode[0]} (staleness {self._mode[1]:g}): start all with the same --kv-store")
        self._mode, self.staleness = mode, mode[1]
        for entry in keys:
            known = self._declared.setdefault(entry["key"], entry)
            if known != entry:
                raise Rejected(f"worker {worker} announces key {entry['key']} as {_brief(entry)}, another worker as "
                               f"{_brief(known)}: all workers must train the same model")
            for index, length in entry["slices"]:
                if (entry["key"], index) not in self._slices:
                    self._slices[entry["key"], index] = self._new(entry, length)

    def _check(self, entry: dict[str, Any]) -> dict[str, Any]:
        slices = [[int(index), int(length)] for index, length in entry["slices"]]
        if entry["dtype"] not in DTYPES or any(not 0 <= length <= 1 << 31 for _, length in slices):
            raise ValueError(f"key {entry['key']}: dtype {entry['dtype']!r} or a slice's length is impossible")
        return {"key": int(entry["key"]), "name": str(entry["name"]), "dtype": str(entry["dtype"]),
                "weight": bool(entry["weight"]), "slices": slices}

    def _new(self, entry: dict[str, Any], length: int) -> _Slice:
        value = Buffer(np.zeros(length, entry["dtype"]))
        piece = _Slice(value, [], entry["dtype"], entry["weight"], [0] * self.num_workers, seen=[0] * self.num_workers)
        if self.spec and self.make_step and piece.is_weight:
            piece.step = self.make_step(self.spec, entry["key"], value.array)
        return piece

    def initialise(self, worker: int, key: int, index: int, data: np.ndarray) -> None:
        """The first value of a slice; a later one (a worker that starts again) changes nothing."""
        piece = self._find(key, index)
        if piece.initial:
            piece.value.array[:] = data
            piece.initial = False

    def optimize(self, spec: dict[str, Any]) -> None:
        """From now on each round (or push) of a weight makes a step of the optimizer `spec`; only of the keys that its
        "keys" name, if it has that: another model's optimizer stays. Raises Rejected."""
        if self.make_step is None:
            raise Rejected("this server has no optimizers")
        named = spec.get("keys")
        if not isinstance(named, (dict, type(None))):
            raise Rejected(f"the optimizer's \"keys\" are {named!r}, expected an object of key numbers")
        for (key, _), piece in self._slices.items():
            if piece.is_weight and (named is None or str(key) in named):
                piece.step = self.make_step(spec, key, piece.value.array)
        self.spec = spec

    def slices(self) -> dict[tuple[int, int], _Slice]:
        """(key, slice) -> what is held, for reading and writing optimizer states."""
        return self._slices

    # -- pushes and pulls -----------------------------------------------------------------------------------------

    def buffer(self, worker: int, key: int, index: int, nbytes: int, dtype: int) -> Buffer:
        """Memory for one worker's push or init of a slice. Raises Rejected when the size or type is not the slice's."""
        piece = self._find(key, index)
        expected = piece.value.array
        if DTYPES[dtype] != piece.dtype or nbytes != expected.nbytes:
            raise Rejected(f"worker {worker} sends {nbytes} bytes of {DTYPES[dtype]} for key {key} slice {index}, "
                           f"expected {expected.nbytes} bytes of {piece.dtype}")
        return piece.spare.pop() if piece.spare else Buffer(np.empty_like(expected))

    def give_back(self, key: int, index: int, data: Buffer) -> None:
        """A buffer from `buffer` that is not needed after all."""
        self._find(key, index).spare.append(data)

    def push(self, worker: int, key: int, index: int, clock: int, rate: float, data: Buffer, now: float = 0.0
             ) -> list[Reply]:
        """One worker's gradient at its `clock`; returns the pulls that can be answered now. Raises Rejected."""
        piece = self._find(key, index)
        if clock <= piece.clocks[worker]:  # a repeated push counts once
            piece.spare.append(data)
            return []
        if clock != piece.clocks[worker] + 1:
            raise Rejected(f"worker {worker} pushes key {key} slice {index} at clock {clock}, "
                           f"expected {piece.clocks[worker] + 1}: a push is missing")
        if not self._at_once(piece) and clock - piece.completed > MAX_LAG:
            raise Rejected(f"worker {worker} has pushed key {key} {MAX_LAG} times more than the others, without a pull")
        piece.clocks[worker] = clock
        if self._at_once(piece):
            self._apply(piece, data, rate)
            piece.spare.append(data)
        else:
            self._collect(piece, worker, clock, rate, data, now)
        return self._answer(key, index, piece)

    def pull(self, worker: int, key: int, index: int, clock: int, now: float = 0.0) -> list[Reply]:
        """The worker's pull at its `clock`: answered now, or later among the replies of somebody's push."""
        piece = self._find(key, index)
        piece.waiting.append((worker, clock, now))
        return self._answer(key, index, piece)

    def finish(self, worker: int) -> list[Reply]:
        """A worker is done with its training: nobody waits for its clock any more."""
        self._finished.add(worker)
        return [reply for (key, index), piece in self._slices.items() for reply in self._answer(key, index, piece)]

    def release(self, reply: Reply) -> None:
        """The reply has been sent, or never will be; its buffer may be written again."""
        reply.buffer.readers -= 1
        piece = self._slices[reply.key, reply.slice]
        if not reply.buffer.readers and reply.buffer is not piece.value:
            piece.spare.append(reply.buffer)

    def overdue(self, now: float) -> str:
        """Empty, or who keeps others waiting: for longer than `wait_seconds`, or for ever because it has finished.

        The latter is said when it is still so at the next call: for a lost worker the scheduler has better words.
        """
        places = self._slices.items()
        absent = next(filter(None, (self._absent(key, index, piece) for (key, index), piece in places)), "")
        before, self._absence = self._absence, absent
        if absent and absent == before:
            return absent
        return next(filter(None, (self._late(key, index, piece, now) for (key, index), piece in places)), "")

    def _absent(self, key: int, index: int, piece: _Slice) -> str:
        for number, pushes in piece.rounds.items():
            gone = sorted(self._finished - pushes.keys())
            if gone:
                return (f"round {number} of {self._name(key, index)}: worker {gone[0]} has finished already and will "
                        "never push it; all workers must make the same number of steps")
        return ""

    def _late(self, key: int, index: int, piece: _Slice, now: float) -> str:
        for number, since in piece.since.items():
            if now - since > self.wait_seconds:
                missing = [str(w) for w in range(self.num_workers) if w not in piece.rounds[number]]
                return (f"round {number} of {self._name(key, index)} has waited {now - since:.0f} s for worker "
                        f"{', '.join(missing)} (DMLTRAIN_WAIT_TIMEOUT)")
        for worker, clock, since in piece.waiting:
            if self._at_once(piece) and now - since > self.wait_seconds:
                slow = [str(w) for w, reached in enumerate(piece.clocks)
                        if w not in self._finished and reached < clock - self.staleness]
                return (f"worker {worker} has waited {now - since:.0f} s at clock {clock} of {self._name(key, index)} "
                        f"for worker {', '.join(slow)} (DMLTRAIN_WAIT_TIMEOUT)")
        return ""

    def _name(self, key: int, index: int) -> str:
        return f"key {self._declared[key]['name']!r} slice {index}"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _find(self, key: int, index: int) -> _Slice:
        piece = self._slices.get((key, index))
        if piece is None:
            raise Rejected(f"key {key} slice {index} was never declared to this server")
        return piece

    def _at_once(self, piece: _Slice) -> bool:
        return piece.is_weight and self._mode is not None and self._mode[0] != "dist_sync"

    def _collect(self, piece: _Slice, worker: int, clock: int, rate: float, data: Buffer, now: float) -> None:
        pushes = piece.rounds.setdefault(clock, {})
        piece.since.setdefault(clock, now)
        pushes[worker] = data
        if len(pushes) < self.num_workers:
            return
        del piece.rounds[clock], piece.since[clock]
        total = pushes[0]
        for other in range(1, self.num_workers):
            np.add(total.array, pushes[other].array, out=total.array)
            piece.spare.append(pushes[other])
        piece.completed = clock
        if piece.is_weight and piece.step is not None:
            self._apply(piece, total, rate)
            piece.spare.append(total)
        else:
            self._replace(piece, total)

    def _apply(self, piece: _Slice, gradient: Buffer, rate: float) -> None:
        if piece.step is None:
            raise Rejected(f"kvstore {self._mode and self._mode[0]} makes the optimizer's step on the server and has "
                           "no optimizer: call set_optimizer before the first push")
        if piece.value.readers:  # somebody is being sent this value: step on a copy
            fresh = piece.spare.pop() if piece.spare else Buffer(np.empty_like(piece.value.array))
            fresh.array[:] = piece.value.array
            self._replace(piece, fresh)
        piece.step(piece.value.array, gradient.array, rate)
        piece.steps += 1

    def _replace(self, piece: _Slice, fresh: Buffer) -> None:
        old, piece.value = piece.value, fresh
        if not old.readers:
            piece.spare.append(old)

    def _answer(self, key: int, index: int, piece: _Slice) -> list[Reply]:
        if not piece.waiting:
            return []
        if self._at_once(piece):
            running = [c for w, c in enumerate(piece.clocks) if w not in self._finished]
            reached = min(running, default=math.inf) + self.staleness
        else:
            reached = piece.completed
        ready = [pull for pull in piece.waiting if pull[1] <= reached]
        piece.waiting = [pull for pull in piece.waiting if pull[1] > reached]
        return [self._reply(key, index, piece, worker, clock) for worker, clock, _ in ready]

    def _reply(self, key: int, index: int, piece: _Slice, worker: int, clock: int) -> Reply:
        others = max(0, piece.steps - piece.seen[worker] - 1)  # steps by others since this worker's last pull
        piece.seen[worker] = piece.steps
        piece.value.readers += 1
        return Reply(worker, key, index, clock, float(others), piece.value)


def _brief(entry: dict[str, Any]) -> str:
    return f"{entry['name']!r} ({entry['dtype']}, slices {str(entry['slices'])[:60]})"


