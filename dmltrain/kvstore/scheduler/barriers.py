"""Which workers have reached the barriers of a job that is not elastic. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Barrier:
    name: str
    since: float  # s, when the first worker reached it
    missing: set[int]


@dataclass
class Barriers:
    """Of `workers`. A barrier is open from the first worker that reaches it to the last one."""

    workers: int
    _open: dict[str, Barrier] = field(default_factory=dict)

    def reach(self, name: str, worker: int, now: float) -> Barrier:
        """A worker reaches it, which may be the last one."""
        barrier = self._open.setdefault(name, Barrier(name, now, set(range(self.workers))))
        barrier.missing.discard(worker)
        if not barrier.missing:
            del self._open[name]
        return barrier

    def overdue(self, since: float) -> Barrier | None:
        """One that is open since earlier."""
        return next((each for each in self._open.values() if each.since < since), None)

    def waiting_for(self, worker: int) -> Barrier | None:
        """One that this worker has not reached."""
        return next((each for each in self._open.values() if worker in each.missing), None)
