"""The pulls of slices, each answered as soon as its clock permits. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dmltrain.kvstore.server.declared import Declared, Rejected
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.pushes import MAX_LAG
from dmltrain.kvstore.server.reply import Action, Reply
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.server.workers import Workers
from dmltrain.kvstore.transport.wire import DTYPES

MAX_WAITING = 2 * MAX_LAG  # maximum of a worker's pulls of a slice that wait for their clock
Pull = tuple[int, int, float]  # worker, clock, since when (s)


@dataclass(eq=False)
class Pulls:
    """`declared` has the bound on staleness, `workers` who has finished: nobody waits for these."""

    declared: Declared
    workers: Workers

    def check(self, worker: int, key: int, index: int, slice_: ServerSlice) -> None:
        """Raises Rejected if MAX_WAITING pulls of the worker wait already."""
        if isinstance(slice_, FlatSlice) and slice_.apart:
            pulls = [gathering.worker for gathering in slice_.gatherings]
        elif len(slice_.waiting) < MAX_WAITING:
            return
        else:
            pulls = [rank for rank, _, _ in slice_.waiting]
        if pulls.count(worker) >= MAX_WAITING:
            named = slice_.named(key, index)
            raise Rejected(
                f"worker {worker} has {MAX_WAITING} pulls of key {named[0]} slice {named[1]} that wait for other "
                f"workers: wait for at least one in {MAX_WAITING}"
            )

    def answer(self, key: int, index: int, slice_: ServerSlice, now: float) -> list[Action]:
        """The replies to the pulls that need not wait any longer."""
        if not slice_.waiting or slice_.is_changing:
            return []  # no pull is waiting, or the value is being changed
        return [self._reply(key, index, slice_, pull, now) for pull in self._take_ready(slice_)]

    def _take_ready(self, slice_: ServerSlice) -> list[Pull]:
        pushes, waiting = slice_.pushes, slice_.waiting
        if not pushes.at_once:
            ready = [pull for pull in waiting if pull[1] <= pushes.completed]
            slice_.waiting = (
                [] if len(ready) == len(waiting) else [pull for pull in waiting if pull[1] > pushes.completed]
            )
            return ready
        finished, applied = self.workers.finished, pushes.applied
        running = [clock for worker, clock in applied.items() if worker not in finished]
        reached = min(running, default=math.inf) + self.declared.staleness
        ready, slice_.waiting = [], []
        for pull in waiting:  # a worker reads its own pushes: the value must contain them
            (ready if pull[1] <= min(reached, applied[pull[0]]) else slice_.waiting).append(pull)
        return ready

    def _reply(self, key: int, index: int, slice_: ServerSlice, pull: Pull, now: float) -> Reply:
        worker, clock, asked = pull
        others = max(0, slice_.behind(worker) - 1)  # steps by others since this worker's last pull
        slice_.seen[worker] = slice_.steps
        waited, worked = self._times(slice_, worker, asked, now)
        buffer, dtype = slice_.at(clock), DTYPES.index(slice_.dtype)
        if slice_.coded is not None and slice_.result_codec is not None:
            buffer, dtype = slice_.coded, slice_.result_codec.number
        buffer.readers += 1
        slice_.note_pull(worker)
        return Reply(worker, key, index, clock, float(others), buffer, dtype, waited, worked, slice_.priority, slice_)

    def _times(self, slice_: ServerSlice, worker: int, asked: float, now: float) -> tuple[float, float]:
        """How long the worker has waited for others, and for this server's work, in seconds; see wire.Header."""
        arrival = slice_.arrived.get(worker if slice_.pusher < 0 else slice_.pusher)
        if arrival is None:
            return 0.0, 0.0
        if slice_.pusher >= 0:
            return max(0.0, arrival.since - asked), 0.0
        if not slice_.pushes.at_once:
            return arrival.behind, arrival.applied - arrival.complete
        # Each push is a step; a worker waits for others, if at all, after its own step.
        waited = now - max(asked, arrival.applied) if self.declared.staleness < math.inf else 0.0
        return waited, now - max(asked, arrival.since) - waited
