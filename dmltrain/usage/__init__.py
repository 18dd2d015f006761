"""What an epoch used of CPUs, memory and GPUs: the line `Epoch[k] Usage: ...` of the log (`record.usage`).

Processor times are differences of the kernel's counters, so they are exact means. GPUs have no such counter: a thread
samples them. An epoch costs about 0.1 ms on the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import psutil

from dmltrain.base.capacity import Capacity

MIB = 2**20


@dataclass(frozen=True)
class GpuUse:
    """The use of this worker's GPUs; None where the driver does not tell."""

    busy: float | None  # fraction of the time, mean over GPUs
    memory: float | None  # MiB in use, sum over GPUs


class Gpus(Protocol):
    def take(self) -> GpuUse:
        """What was used since the last call."""


class Usage:
    """Call `begin` and `end` around each epoch."""

    def __init__(
        self,
        gpus: Gpus | None = None,
        capacity: Capacity | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_seconds: Callable[[], float] = time.process_time,  # of all threads of this process
    ):
        self._gpus, self._capacity = gpus, capacity or Capacity()
        self._clock, self._cpu_seconds = clock, cpu_seconds
        self._process = psutil.Process()
        self.begin()

    def begin(self) -> None:
        self._began, self._own, self._all = self._clock(), self._cpu_seconds(), self._capacity.busy()
        if self._gpus:
            self._gpus.take()  # drops the samples of the time before

    def end(self) -> dict[str, float]:
        """The values of the line since `begin`, in its order; those that are unknown are left out."""
        seconds, own, every = self._clock() - self._began, self._cpu_seconds() - self._own, self._capacity.busy()
        host = None if every is None or self._all is None else max(0.0, every - self._all)
        gpus = self._gpus.take() if self._gpus else GpuUse(None, None)
        values = {
            "cpu": own / seconds if seconds > 0 else None,
            "host-cpu": None if host is None or seconds <= 0 else min(1.0, host / seconds / self._capacity.cores),
            "memory": self._process.memory_info().rss / MIB,
            "host-memory": self._capacity.memory(),
            "gpu": gpus.busy,
            "gpu-memory": gpus.memory,
        }
        return {name: value for name, value in values.items() if value is not None}
