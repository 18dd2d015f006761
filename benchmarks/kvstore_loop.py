"""The timed loop that every worker program of the kvstore benchmark runs, whatever system it speaks to.

A contestant is an object with `gradients` and `results` (numpy views), `step()` (push all keys, pull all keys, return
when the results are there) and `close()`. The driver (kvstore_team.py) asks for a block of steps with a JSON message
over an inherited pipe; the answer has the seconds and the CPU seconds of each step. Only `step()` is timed; each
result is checked after it.
"""

import json
import os
import time
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from kvstore_workload import Reference, patterns, write

PIPE_VARIABLE = "BENCHMARK_PIPE_FD"


class Contestant(Protocol):
    """One worker's end of the system under test."""

    gradients: list[np.ndarray]
    results: list[np.ndarray]

    def step(self) -> None:
        """Push all gradients, pull all results, wait until they are there."""

    def close(self) -> None:
        """Leave the job."""


def serve(contestant: Contestant, rank: int, workers: int, momentum: bool) -> None:
    """Answer the driver's block requests until it closes the pipe."""
    pipe = Connection(int(os.environ[PIPE_VARIABLE]))
    reference = Reference(momentum, rank, workers)
    sources = patterns([gradient.shape for gradient in contestant.gradients], rank)
    pipe.send_bytes(b"ready")
    first_step = 0
    while (steps := receive(pipe)) > 0:
        block = run_block(contestant, reference, sources, range(first_step, first_step + steps))
        first_step += steps
        pipe.send_bytes(json.dumps(block).encode())
    contestant.close()


def receive(pipe: Connection) -> int:
    """Steps of the next block; 0 when the driver is done."""
    try:
        return int(json.loads(pipe.recv_bytes())["steps"])
    except EOFError:
        return 0


def run_block(
    contestant: Contestant, reference: Reference, sources: list[np.ndarray], steps: range
) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each step; raises WrongResult if a result is not what it should be."""
    seconds, cpu_seconds = [], []
    for step in steps:
        write(contestant.gradients, sources, reference.rank, step)
        start, cpu_start = time.perf_counter(), time.process_time()
        contestant.step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        reference.advance(step)
        reference.check_marked(contestant.results)
    reference.check_all(contestant.results, sources)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}
