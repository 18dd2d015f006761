"""The optimizer on the workers, any of torch; servers only sum. This is the default of dist_sync.

If the optimizer allows it (parts.py), each bucket is stepped as soon as its sum has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmltrain.backends.torch.distributed import parts
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.overlap import Mode, OverlappedOptimizer
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import READ


class OptimizerOnWorkers(OverlappedOptimizer):
    """See the module."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, mode: Mode) -> None:
        super().__init__(model, optimizer, store, mode, mean=mode.average)
        self._factors = {  # of the values that are pulled
            bucket: store.factor_to_mean(bucket.name) if mode.average else 1.0 for bucket in self._buckets
        }
        self._groups: list[dict[str, Any]] | None = None  # the options of the step whose buckets are pending
        in_buckets = {parameter for bucket in self._buckets for parameter in bucket.parameters}
        self._frozen = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in in_buckets
        ]

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        gradients = bucket.host_gradients()
        bucket.note_version()
        out = READ if bucket.device.type == "cpu" else gradients  # pinned memory, from which a GPU copies
        self._pending[bucket] = self.store.pushpull(bucket.name, gradients, out, bucket.priority, wait=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._push_all()
        self._groups = self._options_of_parts()
        if self._groups is None:
            self._wait(list(self._pending))
            self.inner.step()
            for bucket in self._buckets:
                bucket.begin()
            return loss
        for bucket in self._buckets:
            bucket.stepped = True
        if not self._defer:
            self._wait(list(self._pending))
        return loss

    def reduce_gradients(self) -> None:
        self._push_all()
        self._wait(list(self._pending))

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.settle()
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        self.settle()

    def _push_all(self) -> None:
        self.push_gradients()
        for bucket in self._pending:
            bucket.check_unchanged()

    def _options_of_parts(self) -> list[dict[str, Any]] | None:
        """The groups' options for a step in parts; None if the step must be made at once."""
        if len(self._pending) < len(self._buckets) or any(each.grad is not None for each in self._frozen):
            return None
        if not all(bucket.has_gradients for bucket in self._buckets):
            return None
        return parts.options_of(self.inner)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        total = handle.values[0] if handle.values else bucket.host_memory
        if not bucket.stepped:
            bucket.take_gradients(total, self._factors[bucket])
            return
        assert self._groups is not None  # step() sets `stepped` only if it has found these options
        bucket.check_unchanged()
        with bucket.gradients_in_place(total, self._factors[bucket]):
            parts.step(self.inner, self._groups[bucket.group], bucket.parameters)
        bucket.begin()
