"""Servers sum; the worker's own optimizer steps: any torch optimizer, dist_sync's default.

Where the optimizer allows it (parts.py), each bucket is stepped for itself as soon as its sum is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmltrain.backends.torch.distributed import parts as torch_parts
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.overlap import OverlappedOptimizer
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import READ


class OptimizerOnWorkers(OverlappedOptimizer):
    """See the module."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        average: bool,
        overlap: bool,
        defer: bool,
    ) -> None:
        super().__init__(model, optimizer, store, average, overlap, defer)
        self._factor = 1.0 / store.num_workers if average else 1.0
        self._groups: list[dict[str, Any]] | None = None  # the options of the step whose buckets are under way
        shared = {parameter for bucket in self._buckets for parameter in bucket.parameters}
        self._others = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter not in shared
        ]  # frozen ones

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        gradients = bucket.host_gradients()
        bucket.note_version()
        out = READ if bucket.device.type == "cpu" else gradients  # a GPU takes it from pinned memory
        self._under_way[bucket] = self.store.pushpull(bucket.name, gradients, out, bucket.priority, wait=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._send_all()
        self._groups = self._parts()
        if self._groups is None:
            self._wait(list(self._under_way))
            self.inner.step()
            for bucket in self._buckets:
                bucket.begin()
            return loss
        for bucket in self._buckets:
            bucket.stepped = True
        if not self._defer:
            self._wait(list(self._under_way))
        return loss

    def reduce_gradients(self) -> None:
        self._send_all()
        self._wait(list(self._under_way))

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.settle()
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        self.settle()

    def _send_all(self) -> None:
        self.push_gradients()
        for bucket in self._under_way:
            bucket.check_unchanged()

    def _parts(self) -> list[dict[str, Any]] | None:
        """The groups' options, for a step in parts; None where it has to be made at once."""
        if len(self._under_way) < len(self._buckets) or any(each.grad is not None for each in self._others):
            return None
        if not all(bucket.has_gradients for bucket in self._buckets):
            return None
        return torch_parts.options_of(self.inner)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        total = handle.values[0] if handle.values else bucket.host_memory
        if not bucket.stepped:
            bucket.take_gradients(total, self._factor)
            return
        assert self._groups is not None  # buckets are stepped only where step() has found options for parts
        bucket.check_unchanged()
        with bucket.gradients_in_place(total, self._factor):
            torch_parts.step(self.inner, self._groups[bucket.group], bucket.parameters)
        bucket.begin()
