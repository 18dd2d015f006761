"""The outer optimizer of one bucket: from the weights at the last average and the mean of the workers' weights to the
next weights of all workers (kvstore/local_steps.py). It runs on every worker, with the same numbers."""

from __future__ import annotations

import torch

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.local_steps import LocalSteps


class OuterOptimizer:
    """`start`: the bucket's weights at the last average, (elements,). `momentum`: (elements,), None without momentum.
    Both lie in the memory order of the bucket, on its device."""

    def __init__(self, bucket: Bucket, settings: LocalSteps) -> None:
        self.bucket, self._settings = bucket, settings
        self.start = torch.zeros_like(bucket.gradients)
        self.momentum = torch.zeros_like(self.start) if settings.outer_momentum else None

    def begin(self) -> None:
        """The local steps begin."""
        self.bucket.copy_weights(self.start)

    def send(self, store: KVStore) -> Handle:
        """Push this worker's part of the outer gradient, and pull that of all workers. The bucket's memory for
        gradients has no other use here: each worker's own gradients stay where backward puts them."""
        part = self.bucket.gradients
        self.bucket.copy_weights(part)
        torch.sub(self.start, part, out=part)
        return self.bucket.send(store)

    def take(self, handle: Handle, factor: float) -> None:
        """Make the outer step with what `send` has pulled, times `factor`."""
        self.bucket.take_result(handle, factor)
        outer_step(self.start, self.bucket.gradients, self.momentum, self._settings)
        self.bucket.set_weights(self.start)


def outer_step(
    weights: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor | None, settings: LocalSteps
) -> None:
    """A step of Nesterov's momentum as torch.optim.SGD makes it, which DiLoCo uses; changes `weights` and `momentum`
    (elements,) in place."""
    weights.add_(gradient, alpha=-settings.outer_lr)
    if momentum is not None:
        momentum.mul_(settings.outer_momentum).add_(gradient)
        weights.add_(momentum, alpha=-settings.outer_lr * settings.outer_momentum)
