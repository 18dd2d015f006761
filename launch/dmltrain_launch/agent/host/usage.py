"""Samples what the host and the job's processes use: CPUs, memory, GPUs. Sent as `Used` events; Linux.

CPU times are differences of the kernel's counters, so a long interval loses nothing. The interval doubles after each
ROWS_PER_PACE samples: a job of any length gets 24 samples or more over its second half, and few in all (`Pace`).
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from typing import NamedTuple

from dmltrain.base.capacity import TICKS, Capacity
from dmltrain_launch.agent.channel import Channel
from dmltrain_launch.agent.events import Used
from dmltrain_launch.agent.host.gpus import Gpus

ROWS_PER_PACE = 32
LEAST_SECONDS = 0.05  # since the last sample, for one more at the end
MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


class Pace:
    """When the next sample is due. `interval`: seconds at first."""

    def __init__(self, interval: float, now: float):
        self.interval, self.due, self._rows = interval, now + interval, 0

    def took(self, now: float) -> None:
        self._rows += 1
        if self._rows % ROWS_PER_PACE == 0:
            self.interval *= 2
        self.due = now + self.interval


class Counters(NamedTuple):
    """CPU times in seconds until a point in time."""

    time: float
    host: float | None
    job: float


class Usage:
    """Call `sample` at `due`, and `close` at the end. Does not block: GPUs are asked in a process of their own."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        channel: Channel,
        interval: float,
        now: float,
        capacity: Callable[[], Capacity] = Capacity,
    ):
        self._channel, self._capacity, self._processes = channel, capacity(), JobProcesses(os.getpid())
        self._pace = Pace(interval, now)
        self.gpus = Gpus(selector)
        self._before = self._counters(now)[0]

    @property
    def due(self) -> float:
        return self._pace.due

    def sample(self, now: float) -> None:
        """Send the usage since the last sample. While the channel is full it waits, and the next one covers more."""
        self._pace.took(now)
        before = self._before
        if self._channel.full or now - before.time < LEAST_SECONDS:
            return
        self._before, memory = self._counters(now)
        seconds, gpus = now - before.time, self.gpus.take()
        host, job = self._before.host, max(0.0, self._before.job - before.job) / seconds
        busy = None if host is None or before.host is None else (host - before.host) / seconds / self._capacity.cores
        event = Used(
            self._channel.host,
            None if busy is None else round(min(1.0, max(0.0, busy)), 4),
            _rounded(self._capacity.memory(), 4),
            round(job, 4),
            round(memory / MIB, 1),
            _rounded(gpus.busy, 4),
            _rounded(gpus.memory, 1),
        )
        self._channel.send(event)

    def _counters(self, now: float) -> tuple[Counters, int]:
        """And the bytes of the job's processes."""
        seconds, memory = self._processes.use(self.gpus.pid)
        return Counters(now, self._capacity.busy(), seconds), memory

    def close(self, now: float) -> None:
        """Send a last sample, and end what was started."""
        self.sample(now)
        self.gpus.close()


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# -- the processes of the job ----------------------------------------------------------------------------------------


class _Stat(NamedTuple):
    """What /proc/PID/stat says; `ticks` includes children that the process has waited for."""

    parent: int
    ticks: int
    children_ticks: int
    pages: int


class JobProcesses:
    """All descendants of the process `root`, the agent. It adopts orphans, so they stay descendants.

    Most processes of a host are not the job's. Those known to be none are read again only every RENEW calls, since
    their pids may have new owners.
    """

    RENEW = 16

    def __init__(self, root: int, proc: str = "/proc"):
        self._root, self._proc = root, proc
        self._others: set[int] = set()
        self._calls = 0

    def use(self, left_out: int = 0) -> tuple[float, int]:
        """CPU seconds until now, those of ended processes included; bytes of resident memory. Without `left_out`."""
        if self._calls % self.RENEW == 0:
            self._others = set()
        self._calls += 1
        stats = self._look()
        mine = self._descendants(stats)
        known = self._others | stats.keys()
        self._others |= {pid for pid in stats.keys() - mine - {self._root} if stats[pid].parent in known}
        own = stats.get(self._root)
        counted = [stats[pid] for pid in mine if pid != left_out]
        ticks = sum(stat.ticks for stat in counted) + (own.children_ticks if own else 0)
        return ticks / TICKS, PAGE * sum(stat.pages for stat in counted)

    def _look(self) -> dict[int, _Stat]:
        stats = {}
        for name in os.listdir(self._proc):
            if name.isdigit() and int(name) not in self._others:
                stat = _stat(f"{self._proc}/{name}/stat")
                if stat is not None:
                    stats[int(name)] = stat
        return stats

    def _descendants(self, stats: dict[int, _Stat]) -> set[int]:
        children: dict[int, list[int]] = {}
        for pid, stat in stats.items():
            children.setdefault(stat.parent, []).append(pid)
        mine: set[int] = set()
        pending = [self._root]
        while pending:
            fresh = set(children.get(pending.pop(), ())) - mine
            mine |= fresh
            pending.extend(fresh)
        return mine - {self._root}


def _stat(path: str) -> _Stat | None:
    """None if the process is gone. man 5 proc describes the fields; [0] here is the third, the state."""
    try:
        with open(path, "rb") as file:
            text = file.read()
        fields = text[text.rindex(b")") + 2 :].split()  # the command's name, in parentheses, may contain any character
        user, system, *children = map(int, fields[11:15])
        return _Stat(int(fields[1]), user + system + sum(children), sum(children), max(0, int(fields[21])))
    except (OSError, ValueError, IndexError):
        return None
