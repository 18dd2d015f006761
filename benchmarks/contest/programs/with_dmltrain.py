"""The program of all processes of a dmltrain job in the kvstore benchmark.

In a scheduler or server `create` serves the job and ends the process. torch is imported later, and only for momentum.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

import numpy as np
from contest.loop import serve
from contest.lossy import TYPES, Cumulative, parameters
from contest.workload import KEYS, LEARNING_RATE, MOMENTUM, bytes_of, shapes_of

import dmltrain.kvstore

if TYPE_CHECKING:
    import torch


class Dmltrain:
    """One dmltrain worker, as in training: gradients are written to buffers that are pushed without a copy, and sums
    are read in place."""

    def __init__(self, shapes: list[tuple[int, ...]], mode: str, codec: str = "none") -> None:
        self.kv = dmltrain.kvstore.create("dist_sync")
        if codec != "none":
            self.kv.set_gradient_compression(parameters(codec, self.kv.num_workers))
        self.shapes, self.keys = shapes, list(range(len(shapes)))
        self.results = arena(shapes)  # with momentum the weights
        if mode == "momentum-server":
            self.kv.set_optimizer({"name": "sgd", "lr": LEARNING_RATE, "momentum": MOMENTUM})
        self.kv.init(self.keys, self.results)
        self.values = self.kv.buffers(self.keys)
        self.gradients = [value.reshape(shape) for value, shape in zip(self.values, shapes, strict=True)]
        self.weights: list[torch.Tensor] = []
        self.optimizer = self.worker_optimizer() if mode == "momentum-worker" else None

    def worker_optimizer(self) -> torch.optim.Optimizer:
        """PyTorch's one-pass SGD on this worker's weights, with the sums as their gradients."""
        import torch

        self.weights = [torch.from_numpy(weight) for weight in self.results]
        return torch.optim.SGD(self.weights, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)

    def step(self) -> None:
        """Push all, pull all, wait for all; then run the optimizer if it is on the workers."""
        handle = self.kv.pushpull(self.keys, self.values, out=dmltrain.kvstore.READ, wait=False)
        handle.wait()
        if self.optimizer:
            self.make_step(handle.values)
        else:
            self.results = [value.reshape(shape) for value, shape in zip(handle.values, self.shapes, strict=True)]

    def make_step(self, sums: list[np.ndarray]) -> None:
        """Make the optimizer's step with gradients in the server's memory."""
        import torch

        for weight, total in zip(self.weights, sums, strict=True):
            weight.grad = torch.from_numpy(total).view(weight.shape)
        self.optimizer.step()

    def close(self) -> None:
        """Leave the job."""
        self.kv.close()


def arena(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Contiguous arrays of zeros with these shapes in one block of memory."""
    flat = np.zeros(bytes_of(shapes) // 4, np.float32)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sum", "momentum-worker", "momentum-server"], required=True)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--gc-type", choices=["none", *TYPES], default="none", help="with --mode sum")
    arguments = parser.parse_args()
    shapes = shapes_of(arguments.megabytes, arguments.keys)
    contestant = Dmltrain(shapes, arguments.mode, arguments.gc_type)
    rank, workers = contestant.kv.rank, contestant.kv.num_workers
    judge = None if arguments.gc_type == "none" else Cumulative(arguments.gc_type, shapes, rank, workers)
    serve(contestant, rank, workers, arguments.mode != "sum", judge)


if __name__ == "__main__":
    main()
