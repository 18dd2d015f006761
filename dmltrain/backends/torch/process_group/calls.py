"""The collectives that this worker has called in one group, to compare them with those of the others when they wait.

torch.distributed expects the same calls in the same order on all workers, and gloo waits for ever when they differ. So
a worker publishes a call that is not complete after WAITING_SECONDS in the group's store, and reads what the others
have published there.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

WAITING_SECONDS = 3.0
# Their tensors may differ between workers: only one of them has a list, or each sends other sizes.
OWN_TENSORS = ("gather", "scatter", "all_to_all", "all_to_all_single")
NOT_THE_SCRIPT = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass
class Call:
    """`number`: how many calls of this group came before it."""

    number: int
    what: str  # such as "all_reduce (SUM) of float32 (10,)"
    where: tuple[str, int]  # file and line
    since: float
    limit: float  # s that it may wait; 0: what it waits for has its own limit
    work: dist.Work | None = None

    @property
    def place(self) -> str:
        """Such as "train.py:12"."""
        file, line = self.where
        return f"{Path(file).name}:{line}" if line else file

    @property
    def complete(self) -> bool:
        return self.work is not None and self.work.is_completed()


class Calls:
    """Of one group. `store`: of the group, a connection of its own. One thread makes calls, another one watches."""

    def __init__(self, store: Store, rank: int, ranks: list[int], clock: Callable[[], float] = time.monotonic) -> None:
        """`ranks`: of the group's members among the workers of the job, for messages."""
        self._store, self._rank, self._ranks, self._clock = store, rank, ranks, clock
        self._open: deque[Call] = deque()
        self._made = 0
        self._published: Call | None = None

    def begin(self, what: str, limit: float = 0.0) -> Call:
        """A call of the script; its `work` is set when it is known."""
        while self._open and self._open[0].complete:
            self._open.popleft()
        call = Call(self._made, what, _where(), self._clock(), limit)
        self._made += 1
        self._open.append(call)
        return call

    def difference(self) -> str:
        """What differs between the call that this worker waits for and another worker's call at the same place in the
        order of calls; "" if nothing does, or if no call waits."""
        own = self._waits_for(WAITING_SECONDS)
        if own is None:
            return ""
        if own is not self._published:
            self._store.set(str(self._rank), json.dumps([own.number, own.what, own.place]))
            self._published = own
        for worker, number, what, place in self._others():
            if number == own.number and what != own.what:
                return (
                    f"different calls of torch.distributed: worker {self._ranks[self._rank]} waits in {own.what} "
                    f"({own.place}), worker {worker} in {what} ({place}): all workers must make the same calls in "
                    "the same order, with the same reduction and root, and tensors of the same shape and type"
                )
        return ""

    def overdue(self) -> str:
        """Which call has waited for longer than its limit, and for whom; "" if none has."""
        own = self._waits_for(0.0)
        if own is None or not own.limit or self._clock() - own.since < own.limit:
            return ""
        came = {self._ranks[self._rank], *(worker for worker, number, *_ in self._others() if number == own.number)}
        late = ", ".join(f"worker {worker}" for worker in self._ranks if worker not in came)
        # Those that wait have published it by then.
        known = f", which {late} did not call" if late and own.limit > 2 * WAITING_SECONDS else ""
        return (
            f"worker {self._ranks[self._rank]} has waited for {own.limit:g} s in {own.what} ({own.place}){known}: "
            "init_process_group(timeout=...) sets this limit"
        )

    def _waits_for(self, seconds: float) -> Call | None:
        """The first call that is not complete, if it has waited for so long."""
        own = next((call for call in list(self._open) if not call.complete), None)
        return own if own and self._clock() - own.since >= seconds else None

    def _others(self) -> Iterator[tuple[int, int, str, str]]:
        """The last call that each other worker has published: worker, number, what and place."""
        for rank, worker in enumerate(self._ranks):
            if rank != self._rank and self._store.check([str(rank)]):
                number, what, place = json.loads(self._store.get(str(rank)))
                yield worker, number, what, place


def described(name: str, tensors: list[torch.Tensor], options: Any = None) -> str:
    """The operation with its reduction, its root (the rank in its group) and its tensors, as far as they are the same
    on all workers. `options`: torch's, such as ReduceOptions."""
    reduction, root = getattr(options, "reduceOp", None), getattr(options, "rootRank", None)
    words = [reduction.op.name] if reduction is not None else []
    words += [f"root {root}"] if root is not None else []
    operation = f"{name} ({', '.join(words)})" if words else name
    if name in OWN_TENSORS:
        return operation
    shapes = [f"{_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in tensors[:3]]
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{operation} of {', '.join(shapes)}{more}" if shapes else operation


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _where() -> tuple[str, int]:
    """Where the script has called torch.distributed."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_filename.startswith(NOT_THE_SCRIPT):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("called by torch itself, as in backward()", 0)
