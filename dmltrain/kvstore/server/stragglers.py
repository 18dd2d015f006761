"""Straggler diagnosis: which workers a slice waits for because they have finished or are late. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.server.workers import Workers

CURE = (
    "all workers must make the same number of steps (with dist_local: each must call optimizer.synchronize() after its "
    "last step)"
)


@dataclass(eq=False)
class Stragglers:
    """`limit`: maximum wait of a round or a pull, in seconds."""

    workers: Workers
    limit: float
    _absence: str = ""  # result of `absent` in the last call of `overdue`

    def forget(self) -> None:
        """Another view has begun."""
        self._absence = ""

    def overdue(self, named: Sequence[tuple[str, ServerSlice]], staleness: float, now: float) -> str:
        """Which worker the others wait for: one that has finished, or one that is more than `limit` late; empty if
        none.

        A finished worker is reported only if two calls in a row find it. It may have been lost; then the scheduler,
        which knows the cause, should be the first to report it.
        """
        finished, without_relay = self.workers.finished, self.workers.finished_without_relay()
        absence = _first(
            absent(name, slice_, without_relay if slice_.is_weight else finished) for name, slice_ in named
        )
        before, self._absence = self._absence, absence
        if absence and absence == before:
            return absence
        return _first(
            late(name, slice_, slice_.pushes.applied.keys() - finished, staleness, now, self.limit)
            for name, slice_ in named
        )


def absent(name: str, slice_: ServerSlice, finished: Set[int]) -> str:
    """Which of the `finished` workers a round waits for; empty if none."""
    if slice_.pusher in finished and slice_.waiting:
        return (
            f"worker {slice_.waiting[0][0]} waits for {name}: worker {slice_.pusher} has finished already and will "
            f"never push it; {CURE}"
        )
    for number, pushes in slice_.pushes.rounds.items() if slice_.pusher < 0 else ():
        gone = sorted(finished - pushes.keys())
        if gone:
            return f"round {number} of {name}: worker {gone[0]} has finished already and will never push it; {CURE}"
    return ""


def late(name: str, slice_: ServerSlice, running: Set[int], staleness: float, now: float, limit: float) -> str:
    """Which workers a round has waited for longer than `limit`, in seconds; empty if none. Where each push is a step:
    which of the `running` workers a pull has waited for."""
    for number, pushes in slice_.pushes.rounds.items():
        waited = now - min(push.since for push in pushes.values())
        missing = sorted(slice_.pushes.clocks.keys() - pushes.keys())
        if missing and waited > limit:
            return f"round {number} of {name} has waited {waited:.0f} s for {_workers(missing)}"
    for worker, clock, since in slice_.waiting if slice_.pushes.at_once or slice_.pusher >= 0 else ():
        if now - since > limit and slice_.pusher >= 0:
            return (
                f"worker {worker} has waited {now - since:.0f} s for {name}, which {_workers([slice_.pusher])} pushes"
            )
        if now - since > limit:
            slow = sorted(rank for rank in running if slice_.pushes.applied[rank] < clock - staleness)
            return f"worker {worker} has waited {now - since:.0f} s at clock {clock} of {name} for {_workers(slow)}"
    return ""


def _workers(ranks: list[int]) -> str:
    return f"worker {', '.join(map(str, ranks))} (DMLTRAIN_WAIT_TIMEOUT)"


def _first(reasons: Iterable[str]) -> str:
    """The first that is not empty."""
    return next(filter(None, reasons), "")
