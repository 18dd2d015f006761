"""The program of every process of a dmltrain job in the kvstore benchmark.

Scheduler and servers serve and end inside `create`; torch is imported after it, because they do not need it.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvstore_loop import serve
from kvstore_lossy import TYPES, Cumulative, parameters
from kvstore_workload import LEARNING_RATE, MOMENTUM, bytes_of, shapes_of

import dmltrain.kvstore

if TYPE_CHECKING:
    import torch


class Dmltrain:
    """One dmltrain worker; gradients and results live in flat arenas as in training."""

    def __init__(self, shapes: list[tuple[int, ...]], mode: str, codec: str = "none") -> None:
        self.kv = dmltrain.kvstore.create("dist_sync")
        if codec != "none":
            self.kv.set_gradient_compression(parameters(codec, self.kv.num_workers))
        self.keys = list(range(len(shapes)))
        self.values, self.outs = arena(shapes), arena(shapes)
        self.weights: list[torch.Tensor] = []
        if mode == "momentum-server":
            self.kv.set_optimizer({"name": "sgd", "lr": LEARNING_RATE, "momentum": MOMENTUM})
        self.kv.init(self.keys, self.outs)
        self.optimizer = self.worker_optimizer(shapes) if mode == "momentum-worker" else None
        self.gradients = [value.numpy() for value in self.values]
        self.results = [array.numpy() for array in self.weights or self.outs]

    def worker_optimizer(self, shapes: list[tuple[int, ...]]) -> torch.optim.Optimizer:
        """PyTorch's one-pass SGD on this worker's weights, with the sums as their gradients."""
        import torch

        self.weights = arena(shapes)
        for weight, out in zip(self.weights, self.outs, strict=True):
            weight.grad = out
        return torch.optim.SGD(self.weights, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)

    def step(self) -> None:
        """Push all, pull all, wait for all; then the optimizer where it is this worker's."""
        self.kv.pushpull(self.keys, self.values, out=self.outs, wait=False).wait()
        if self.optimizer:
            self.optimizer.step()

    def close(self) -> None:
        """Leave the job."""
        self.kv.close()


def arena(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors of zeros of these shapes that lie one behind the other in one piece of memory."""
    import torch

    flat = torch.zeros(bytes_of(shapes) // 4)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sum", "momentum-worker", "momentum-server"], required=True)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--gc-type", choices=["none", *TYPES], default="none", help="with --mode sum")
    arguments = parser.parse_args()
    shapes = shapes_of(arguments.megabytes)
    contestant = Dmltrain(shapes, arguments.mode, arguments.gc_type)
    rank, workers = contestant.kv.rank, contestant.kv.num_workers
    judge = None if arguments.gc_type == "none" else Cumulative(arguments.gc_type, shapes, rank, workers)
    serve(contestant, rank, workers, arguments.mode != "sum", judge)


if __name__ == "__main__":
    main()
