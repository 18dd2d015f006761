"""A dmltrain job in the kvstore benchmark that pushes what training pushes: the buckets that `distribute` makes of a
model. In a scheduler or server `create` serves the job and ends the process."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from contest.loop import serve
from contest.workload import KEYS, shapes_of

import dmltrain.kvstore
from dmltrain.backends.torch.distributed.layout import make_buckets


class Buckets:
    """One worker. Its parameters have the shapes of the keys; their gradients lie in the buckets, as after backward."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.kv = dmltrain.kvstore.create("dist_sync")
        model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.buckets = make_buckets(model, torch.optim.SGD(model.parameters(), lr=0.1), "bucket")
        names = [bucket.name for bucket in self.buckets]
        self.kv.init(names, [bucket.weights.on_host() for bucket in self.buckets], mean=True)
        for bucket, memory in zip(self.buckets, self.kv.buffers(names), strict=True):
            bucket.lay_out(memory)
        self.gradients = [view.numpy() for bucket in self.buckets for view in bucket.views]
        self.means: list[torch.Tensor] = []

    def step(self) -> None:
        """Push all buckets in the order of backward, and take their means in the order of the next forward."""
        handles = {bucket: bucket.send(self.kv) for bucket in reversed(self.buckets)}
        self.means = []
        for bucket in self.buckets:
            handles[bucket].wait()
            self.means += bucket.result(handles[bucket], bucket.factor_to_mean(self.kv))

    @property
    def results(self) -> list[np.ndarray]:
        """The sums, which the other contestants get."""
        return [(mean * self.kv.num_workers).numpy() for mean in self.means]

    def close(self) -> None:
        """Leave the job."""
        self.kv.close()


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["buckets"], required=True)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--keys", type=int, default=KEYS)
    arguments = parser.parse_args()
    contestant = Buckets(shapes_of(arguments.megabytes, arguments.keys))
    serve(contestant, contestant.kv.rank, contestant.kv.num_workers, False)


if __name__ == "__main__":
    main()
