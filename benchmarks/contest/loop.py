"""The timed loop of every worker program in the kvstore benchmark, for any system.

A contestant is an object with `gradients` and `results` (numpy views), `step()` (push all keys, pull all keys, return
when the results have arrived) and `close()`. The driver (team.py) requests a block of steps with a JSON message over an
inherited pipe; the answer has the seconds and the CPU seconds of each step. Only `step()` is timed; each result is
checked after it. With "together" in the request, a worker reports before each step that it is ready and waits for the
driver's signal. All other entries of the request are passed to the contestant's `prepare(settings)`, if it has one.
"""

import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from contest.workload import Reference, patterns, write

PIPE_VARIABLE = "BENCHMARK_PIPE_FD"


class Contestant(Protocol):
    """One worker of the system under test."""

    gradients: list[np.ndarray]
    results: list[np.ndarray]

    def step(self) -> None:
        """Push all gradients, pull all results, wait for them."""

    def close(self) -> None:
        """Leave the job."""


class Judge(Protocol):
    """Checks the results: workload.Reference, or lossy.Cumulative for lossy codecs."""

    rank: int

    def advance(self, step: int) -> None:
        """Record that all workers have made this step."""

    def check_marked(self, results: list[np.ndarray]) -> None:
        """Raise WrongResult if this step's results are wrong; a quick check of the marked elements."""

    def check_all(self, results: list[np.ndarray], sources: list[np.ndarray]) -> None:
        """Raise WrongResult if any element is wrong; for the end of a block."""


def serve(contestant: Contestant, rank: int, workers: int, momentum: bool, judge: Judge | None = None) -> None:
    """Answer the driver's block requests until it closes the pipe."""
    pipe = Connection(int(os.environ[PIPE_VARIABLE]))
    reference = judge or Reference(momentum, rank, workers)
    sources = patterns([gradient.shape for gradient in contestant.gradients], rank)
    pipe.send_bytes(b"ready")
    first_step = 0
    while request := receive(pipe):
        steps, together = request.pop("steps"), request.pop("together")
        if request:
            contestant.prepare(request)  # type: ignore[attr-defined]
        begin = (lambda: wait_for_go(pipe)) if together else (lambda: None)
        block = run_block(contestant, reference, sources, range(first_step, first_step + steps), begin)
        first_step += steps
        pipe.send_bytes(json.dumps(block).encode())
    contestant.close()


def receive(pipe: Connection) -> dict[str, Any]:
    """The driver's next request for a block; empty at the end."""
    try:
        return json.loads(pipe.recv_bytes())
    except EOFError:
        return {}


def wait_for_go(pipe: Connection) -> None:
    """Report to the driver that this worker is ready for a step; return when all workers are."""
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()


def run_block(
    contestant: Contestant, reference: Judge, sources: list[np.ndarray], steps: range, begin: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each step; raises WrongResult if a result is wrong."""
    seconds, cpu_seconds = [], []
    for step in steps:
        write(contestant.gradients, sources, reference.rank, step)
        begin()
        start, cpu_start = time.perf_counter(), time.process_time()
        contestant.step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        reference.advance(step)
        reference.check_marked(contestant.results)
    reference.check_all(contestant.results, sources)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}
