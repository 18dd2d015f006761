"""The pushes of a slice: how many of each worker have arrived, and which of them its value lacks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dmltrain.kvstore.server.memory import Buffer

MAX_LAG = 64  # maximum of incomplete rounds of a slice


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


@dataclass(eq=False)
class Pushes:
    """`clocks`: how many pushes of each worker have arrived; `applied`: how many the value contains. Each push is a
    step (`at_once`), or all pushes of one clock are a round."""

    at_once: bool
    clocks: dict[int, int]
    applied: dict[int, int]
    completed: int = 0  # rounds
    rounds: dict[int, dict[int, Push]] = field(default_factory=dict)  # that are not complete: by clock, by worker
    queue: deque[Push] = field(default_factory=deque)  # if each push is a step

    def add(self, push: Push) -> None:
        """A push has arrived."""
        self.clocks |= dict.fromkeys(push.covers, push.clock)
        if self.at_once:
            self.queue.append(push)
        else:
            self.rounds.setdefault(push.clock, {}).update(dict.fromkeys(push.covers, push))

    def lacks_only(self, covers: Sequence[int], clock: int) -> bool:
        """Whether a push at `clock`, of these workers' sum, completes the next round."""
        here = self.rounds.get(clock, {})
        if clock != self.completed + 1 or covers[0] in here:
            return False
        return 0 < len(here) == len(self.clocks) - len(covers)

    def take_next(self, hosts: Iterable[Sequence[int]]) -> list[list[Push]]:
        """The pushes that make the next value, by host; none if they have not all arrived. `hosts`: the workers of
        each, in the order in which hosts are added."""
        if self.at_once:
            return [[self.queue.popleft()]] if self.queue else []
        if len(self.rounds.get(self.completed + 1, ())) != len(self.clocks):
            return []
        by_worker = self.rounds.pop(self.completed + 1)
        present = [[by_worker[worker] for worker in host if worker in by_worker] for host in hosts]
        return [list(dict.fromkeys(pushes)) for pushes in present if pushes]

    def apply(self, pushes: Iterable[Push]) -> None:
        """The value contains these now."""
        for push in pushes:
            self.applied |= dict.fromkeys(push.covers, push.clock)
        if not self.at_once:
            self.completed += 1

    @property
    def are_settled(self) -> bool:
        """Whether each worker has pushed as often as all others, and all of that is in the value."""
        same = len({*self.clocks.values(), *self.applied.values()}) <= 1
        return same and not (self.rounds or self.queue)

    def step_at_once(self, at_once: bool) -> None:
        """From now on each push is a step (`at_once`), or each round is. Call this only while they `are_settled`."""
        self.at_once = at_once
        self.completed = max(self.clocks.values(), default=0)

    def count_from(self, step: int) -> None:
        """All workers have pushed `step` times, and the value contains all these pushes."""
        self.completed = step
        self.clocks = dict.fromkeys(self.clocks, step)
        self.applied = dict(self.clocks)

    def go_on_as(self, other: Pushes) -> None:
        """Have the same clocks as `other`, which has them no longer."""
        self.clocks, self.applied, self.completed = dict(other.clocks), dict(other.applied), other.completed

    # -- changes of the job's members ------------------------------------------------------------------------------

    def restart(self, workers: Iterable[int], makes_steps: bool) -> list[Push]:
        """Begin the rounds of these workers at clock 0, or, if an optimizer makes steps, at the clock of the last step.
        If each push is a step, workers that stay keep their clocks. Returns the pushes that wait: they are
        forgotten."""
        pending = {push: None for pushes in self.rounds.values() for push in pushes.values()}
        pending |= dict.fromkeys(self.queue)
        self.rounds.clear()
        self.queue.clear()
        if self.at_once:
            self.applied = {worker: self.applied.get(worker, 0) for worker in workers}
            self.clocks = dict(self.applied)
        else:
            self.clocks = dict.fromkeys(workers, 0)
            self.count_from(self.completed if makes_steps else 0)
        return list(pending)

    def hold(self, worker: int, step: int) -> None:
        """Each push is a step, and this worker holds its first `step` ones: nobody waits for these."""
        self.applied[worker] = max(self.applied[worker], step)
        self.clocks[worker] = max(self.clocks[worker], step)
