"""A kvstore for workers that are threads of this process: sums are made by who pushes last, and where all workers wait
for one another that is found at once.

It keeps less than a real one promises, so that mistakes show: a pushed array is read as late as it may be, and a result
is no number any more as soon as its key is pushed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import READ, keys_and_values
from tests.backends.agreeing import Together


class Hangs(Exception):
    """All workers that have not ended wait for one another."""


class Finished(Exception):
    """A worker has ended without a part in what this one waits for. Servers of a job say so, too."""


class Round:
    """What the workers have given for one sum."""

    def __init__(self) -> None:
        self.given: dict[int, Array] = {}
        self.result: Array | None = None


class Group:
    """What the workers' stores share."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._changed = threading.Condition()
        self._rounds: dict[tuple[object, int], Round] = {}
        self._given: dict[tuple[object, int], int] = {}  # by key and worker: how often
        self._waiting: dict[int, tuple[str, Round]] = {}
        self._ended: set[int] = set()

    def give(self, key: object, rank: int, array: Array, join: Callable[[list[Array]], Array]) -> Round:
        """This worker's part of its next round of that key; `join` makes the result of all parts."""
        with self._changed:
            number = self._given[key, rank] = self._given.get((key, rank), 0) + 1
            found = self._rounds.setdefault((key, number), Round())
            found.given[rank] = array
            if len(found.given) == self.workers:
                parts = [found.given[each] for each in range(self.workers)]
                assert len({part.shape for part in parts}) == 1, f"workers differ in the size of {key}"
                found.result = join(parts)
                del self._rounds[key, number]
                self._changed.notify_all()
            return found

    def wait(self, rank: int, what: str, found: Round) -> Array:
        with self._changed:
            self._waiting[rank] = what, found
            self._changed.notify_all()
            try:
                while found.result is None:
                    if gone := self._ended - found.given.keys():
                        raise Finished(f"worker {min(gone)} has finished already, {what}")
                    if self._stuck():
                        raise Hangs(", ".join(f"worker {each}: {text}" for each, (text, _) in self._waiting.items()))
                    self._changed.wait()
            finally:
                del self._waiting[rank]
        return found.result

    def end(self, rank: int) -> None:
        """This worker gives nothing any more."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def _stuck(self) -> bool:
        whole = len(self._waiting.keys() | self._ended) == self.workers
        return whole and all(each.result is None for _, each in self._waiting.values())


class MemoryHandle(Handle):
    """A pushpull under way."""

    def __init__(self, group: Group, rank: int, what: str, found: Round, out: Any) -> None:
        super().__init__(1, what, 0.0)
        self._group, self._rank, self.round, self._out = group, rank, found, out

    @property
    def done(self) -> bool:
        return self.round.result is not None

    def wait(self) -> None:
        result = self._group.wait(self._rank, self._what, self.round)
        if self._out is not READ:
            np.copyto(self._out, result.reshape(self._out.shape))
        elif not self.values:
            self.values = [result.copy()]
            self.values[0].flags.writeable = False
        while self._finish:
            self._finish.pop()()


class MemoryStore(KVStore):
    """dist_sync, without codecs, and with the optimizer on the workers."""

    type = "dist_sync"
    num_servers = 1

    def __init__(self, group: Group, rank: int, elastic: bool = False) -> None:
        """`elastic`: the store of an elastic job that loses nobody."""
        self.group, self.rank, self.num_workers, self.elastic = group, rank, group.workers, elastic
        self._initial: dict[object, Array] = {}
        self._means: dict[object, bool] = {}
        self._last: dict[object, MemoryHandle] = {}

    def init(self, key: Any, value: Any, whole: bool = False, mean: bool = False) -> None:
        for name, array in zip(*keys_and_values(key, value), strict=True):
            self._initial[name] = self._together(f"init of {name}", np.array(array).reshape(-1), lambda parts: parts[0])
            self._means[name] = mean and len(self._means) % 2 == 0  # with a codec, servers only sum

    def buffers(self, keys: Sequence[Any]) -> list[Array]:
        return [np.full_like(self._initial[key], np.nan) for key in keys]

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, wait: bool = True, rate: float = -1.0
    ) -> Handle:
        if isinstance(key, list):
            parts = zip(key, value, [READ] * len(key) if out is READ else out, strict=True)
            return Together([self.pushpull(*part, priority, wait) for part in parts])
        for array in self._last[key].values if key in self._last else []:
            array.flags.writeable = True
            array.fill(np.nan)
        flat = np.asarray(value).reshape(-1)
        assert flat.dtype == self._initial[key].dtype and flat.size == self._initial[key].size, f"{key} has changed"
        found = self.group.give(key, self.rank, flat, _mean if self._means[key] else sum)
        handle = MemoryHandle(self.group, self.rank, f"sum of {key}", found, value if out is None else out)
        self._last[key] = handle
        if wait:
            handle.wait()
        return handle

    def push(self, key: Any, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        self.pushpull(key, value, READ, priority, wait=False)

    def pull(self, key: Any, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        for name, array in zip(*keys_and_values(key, out), strict=True):
            if name in self._last:
                MemoryHandle(self.group, self.rank, f"pull of {name}", self._last[name].round, array).wait()
            else:
                np.copyto(array, self._initial[name].reshape(array.shape))
        return Handle(0, "", 1.0)

    def factor_to_mean(self, key: Any) -> float:
        return 1.0 if self._means[key] else 1.0 / self.num_workers

    def barrier(self) -> None:
        self.all_reduce("barrier", np.zeros(1))

    def all_reduce(self, name: str, array: Array) -> Array:
        return self._together(f"all_reduce of {name}", np.array(array, np.float64), sum)

    def broadcast(self, values: Array, needed: bool = True, source: int = 0) -> None:
        found = self._together("broadcast", np.array(values), lambda parts: parts[source])
        if needed:
            values[:] = found

    def _together(self, what: str, own: Array, join: Callable[[list[Array]], Array]) -> Array:
        """All workers are to make the same calls in the same order: where one waits in another call, all hang."""
        return self.group.wait(self.rank, what, self.group.give(what, self.rank, own, join)).copy()


def _mean(parts: list[Array]) -> Array:
    return sum(parts) / len(parts)
