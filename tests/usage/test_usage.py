"""The values of the line Usage."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dmltrain import record
from dmltrain.usage import GpuUse, Usage
from tests.waiting import wait_for


class Host:
    """A host of four cores whose processes have used `seconds`."""

    def __init__(self, seconds: float | None = 0.0):
        self.seconds, self.cores = seconds, 4.0

    def busy(self) -> float | None:
        return self.seconds

    def memory(self) -> float | None:
        return 0.25


class Gpus:
    def __init__(self, *uses: GpuUse):
        self.uses = list(uses)

    def take(self) -> GpuUse:
        return self.uses.pop(0)


def usage(host: Host, gpus: Gpus | None = None) -> tuple[Usage, list[float]]:
    """A Usage, and what its clock and this process's CPU clock say."""
    times = [100.0, 50.0]
    return Usage(gpus, host, lambda: times[0], lambda: times[1]), times


def test_means_over_the_interval():
    host, none = Host(7.0), GpuUse(None, None)
    made, times = usage(host, Gpus(none, GpuUse(0.1, 1.0), GpuUse(0.5, 800.0)))
    times[:] = 200.0, 60.0
    made.begin()
    times[:], host.seconds = (210.0, 78.0), 37.0
    found = made.end()
    assert tuple(found) == record.USAGE
    assert found.pop("memory") == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.2)
    assert found == {"cpu": 1.8, "host-cpu": 0.75, "host-memory": 0.25, "gpu": 0.5, "gpu-memory": 800.0}


def test_a_counter_that_goes_backwards_is_no_use_and_what_is_unknown_is_left_out():
    host = Host(7.0)
    made, times = usage(host)
    times[0], host.seconds = times[0] + 10, 5.0  # a CPU was taken away
    assert made.end()["host-cpu"] == 0.0
    made, times = usage(Host(None))
    times[0] += 1
    assert tuple(made.end()) == ("cpu", "memory", "host-memory")
    made, times = usage(Host(0.0))
    assert tuple(made.end()) == ("memory", "host-memory"), "no time has passed"


def test_all_threads_count():
    made, ended = Usage(), threading.Event()

    def burn() -> None:
        while not ended.is_set():
            sum(range(1000))

    def clocks() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    thread = threading.Thread(target=burn)
    thread.start()
    outer = clocks()
    made.begin()
    inner = clocks()
    wait_for(lambda: time.process_time() - inner[0] > 0.2, "0.2 s of the thread's work")
    (work, seconds), found = (after - before for after, before in zip(clocks(), inner, strict=True)), made.end()
    most, longest = (after - before for after, before in zip(clocks(), outer, strict=True))
    ended.set()
    thread.join()
    assert 0.99 * work / longest <= found["cpu"] <= 1.01 * most / seconds
    assert found["host-cpu"] > 0


def seconds_of(call: Callable[[], object]) -> float:
    """Of the processor, for a call: the least of some."""
    times = []
    for _ in range(50):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def test_an_epoch_costs_no_more_than_reading_some_files_of_the_kernel():
    made = Usage()
    reading = seconds_of(lambda: Path("/proc/self/smaps_rollup").read_bytes() and Path("/proc/stat").read_bytes())
    assert seconds_of(lambda: (made.begin(), made.end())) < 20 * reading
