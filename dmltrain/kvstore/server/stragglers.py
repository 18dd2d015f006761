"""Straggler diagnosis: which workers a slice waits for, because they have finished or are late. Pure."""

from __future__ import annotations

from collections.abc import Set

from dmltrain.kvstore.server.slice import Slice


def absent(name: str, piece: Slice, finished: Set[int]) -> str:
    """Empty, or which of the `finished` workers a round waits for."""
    for number, pushes in piece.rounds.items():
        gone = sorted(finished - pushes.keys())
        if gone:
            return (
                f"round {number} of {name}: worker {gone[0]} has finished already and will never push it; all "
                "workers must make the same number of steps"
            )
    return ""


def late(name: str, piece: Slice, running: Set[int], staleness: float, now: float, limit: float) -> str:
    """Empty, or whom a round has waited for longer than `limit`, in seconds; or, where each push is a step, a pull:
    for which of the `running` workers."""
    for number, pushes in piece.rounds.items():
        waited = now - min(push.since for push in pushes.values())
        missing = sorted(piece.clocks.keys() - pushes.keys())
        if missing and waited > limit:
            return f"round {number} of {name} has waited {waited:.0f} s for {_workers(missing)}"
    for worker, clock, since in piece.waiting if piece.at_once else ():
        if now - since > limit:
            slow = sorted(each for each in running if piece.applied[each] < clock - staleness)
            return f"worker {worker} has waited {now - since:.0f} s at clock {clock} of {name} for {_workers(slow)}"
    return ""


def _workers(ranks: list[int]) -> str:
    return f"worker {', '.join(map(str, ranks))} (DMLTRAIN_WAIT_TIMEOUT)"
