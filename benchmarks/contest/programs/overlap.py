"""The program of all processes in the overlap benchmark (overlap.py): training steps without a framework.

A step is forward, key by key in order, and backward, key by key in reverse order; each key stands for a layer. A
layer's forward begins when the previous layer is complete and the key's sum of the last step has arrived. When a
layer's backward is complete, its gradient is pushed and the sum is pulled, with forward order as priority. Computation
is that of an accelerator: it takes time, but not this processor (`Accelerator`). All layers take the same time, as
ResNet's convolutions nearly do.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from contest.loop import PIPE_VARIABLE, receive
from contest.lossy import TYPES, parameters
from contest.workload import WrongResult, bytes_of, marker, patterns, shapes_of

import dmltrain.kvstore

FORWARD = 1 / 3  # of the computation: backward has two products for each one in forward


@dataclass
class Accelerator:
    """Computes layer after layer; `now` is when the last one was or will be complete, in perf_counter's seconds."""

    now: float

    def compute(self, seconds: float) -> None:
        """Compute for `seconds` from `now`; returns when that is complete, on time if the machine allows."""
        self.now += seconds
        ahead = self.now - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)

    def wait(self, handle: Any) -> None:
        """Wait for a handle; the next computation begins when it is complete."""
        handle.wait()
        self.now = max(self.now, time.perf_counter())


class Training:
    """One worker's steps."""

    def __init__(self, shapes: list[tuple[int, ...]], codec: str) -> None:
        self.kv = dmltrain.kvstore.create("dist_sync")
        if codec != "none":
            self.kv.set_gradient_compression(parameters(codec, self.kv.num_workers))
        self.exact = codec == "none"
        self.keys = forward_order(len(shapes))
        self.gradients, self.sums = arena(shapes), arena(shapes)
        self.kv.init(list(range(len(shapes))), self.sums)
        for gradient, pattern in zip(self.gradients, patterns(shapes, self.kv.rank), strict=True):
            gradient[:] = pattern.reshape(-1)
        self.handles: dict[int, Any] = {}
        self.step = 0

    def run(self, steps: int, compute: float) -> dict[str, list[float]]:
        """Seconds and CPU seconds of each step with `compute` seconds of computation, after one step that fills the
        pipeline."""
        self.kv.barrier()
        accelerator = Accelerator(time.perf_counter())
        self.take(accelerator, compute)
        seconds, cpu_seconds = [], []
        for _ in range(steps):
            start, cpu_start = accelerator.now, time.process_time()
            self.take(accelerator, compute)
            seconds.append(accelerator.now - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        self.drain()
        return {"seconds": seconds, "cpu_seconds": cpu_seconds}

    def take(self, accelerator: Accelerator, compute: float) -> None:
        """One step. It ends with backward; the next step waits for transfers that are still in progress."""
        for key in self.keys:
            if key in self.handles:
                accelerator.wait(self.handles.pop(key))
                self.check(key)
            accelerator.compute(compute * FORWARD / len(self.keys))
        self.step += 1
        for place, key in reversed(list(enumerate(self.keys))):
            accelerator.compute(compute * (1 - FORWARD) / len(self.keys))
            self.exchange(key, -place)
        accelerator.now = max(accelerator.now, time.perf_counter())

    def exchange(self, key: int, priority: int) -> None:
        """Push the key's gradient and pull the sum."""
        flat = self.gradients[key]
        flat[0] = flat[flat.size // 2] = flat[-1] = marker(self.step) * (self.kv.rank + 1)
        self.kv.push(key, flat, priority)
        self.handles[key] = self.kv.pull(key, self.sums[key], priority, wait=False)

    def check(self, key: int) -> None:
        """Raise WrongResult unless the sum belongs to the last step."""
        flat, workers = self.sums[key], self.kv.num_workers
        expected = marker(self.step) * workers * (workers + 1) / 2
        found = (flat[0], flat[flat.size // 2], flat[-1])
        if self.exact and any(value != expected for value in found):
            raise WrongResult(f"worker {self.kv.rank}, key {key}, step {self.step}: {found}, expected {expected}")

    def drain(self) -> None:
        """Wait for all transfers in progress."""
        for handle in self.handles.values():
            handle.wait()
        self.handles.clear()


def forward_order(keys: int) -> list[int]:
    """The keys of workload.py in the order of ResNet's forward: 53 convolutions, with the joined batch-norm vectors
    between them, then the two arrays of the classifier."""
    convolutions = 53
    norms = keys - convolutions - 2
    places = [(number / convolutions, number) for number in range(convolutions)]
    places += [((number + 0.5) / norms, convolutions + number) for number in range(norms)]
    return [key for _, key in sorted(places)] + [keys - 2, keys - 1]


def arena(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Flat, contiguous arrays of these sizes in one block of memory."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    return np.split(np.zeros(bytes_of(shapes) // 4, np.float32), np.cumsum(sizes)[:-1])


def main() -> None:
    """Run one worker. In a scheduler or server `create` serves the job and ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sum"], required=True)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--gc-type", choices=["none", *TYPES], default="none")
    arguments = parser.parse_args()
    training = Training(shapes_of(arguments.megabytes), arguments.gc_type)
    pipe = Connection(int(os.environ[PIPE_VARIABLE]))
    pipe.send_bytes(b"ready")
    while request := receive(pipe):
        pipe.send_bytes(json.dumps(training.run(request["steps"], request["compute"])).encode())
    training.kv.close()


if __name__ == "__main__":
    main()
