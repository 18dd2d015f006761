"""The timed loop that every worker program of the kvstore benchmark runs, whatever system it speaks to.

A contestant is an object with `gradients` and `results` (numpy views), `step()` (push all keys, pull all keys, return
when the results are there) and `close()`. The driver (team.py) asks for a block of steps with a JSON message
over an inherited pipe; the answer has the seconds and the CPU seconds of each step. Only `step()` is timed; each
result is checked after it. With "together" in the message, a worker says that it is ready for a step and waits for the
driver's word. What else the message has goes to the contestant's `prepare(settings)`, if it has that.
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
    """One worker's end of the system under test."""

    gradients: list[np.ndarray]
    results: list[np.ndarray]

    def step(self) -> None:
        """Push all gradients, pull all results, wait until they are there."""

    def close(self) -> None:
        """Leave the job."""


class Judge(Protocol):
    """Knows what the results have to be: workload.Reference, or lossy.py's for codecs that lose."""

    rank: int

    def advance(self, step: int) -> None:
        """The step was taken by all workers."""

    def check_marked(self, results: list[np.ndarray]) -> None:
        """Raise WrongResult if this step's results are wrong; a quick look."""

    def check_all(self, results: list[np.ndarray], sources: list[np.ndarray]) -> None:
        """The same at a block's end; every element."""


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
    """The driver's next request for a block; empty when the driver is done."""
    try:
        return json.loads(pipe.recv_bytes())
    except EOFError:
        return {}


def wait_for_go(pipe: Connection) -> None:
    """Tell the driver that this worker is ready for a step; return when all are."""
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()


def run_block(
    contestant: Contestant, reference: Judge, sources: list[np.ndarray], steps: range, begin: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each step; raises WrongResult if a result is not what it should be."""
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
