"""The base of both distributed optimizers: buckets are pushed during backward, and their results arrive one by one.

A bucket is pending from its push (with the optimizer on the servers: from its pull) until its result is taken. After
`step()` it is `stepped`: its weights may be read only after it is settled. There are two ways to wait:

- `settle` waits for all stepped buckets, where it is not known which weights are read next.
- With `defer`, the model's forward waits for a bucket just before it first reads one of its parameters (gates.py). In
  this time it settles buckets that have arrived, so that the optimizer runs while the worker would wait.
  (ByteScheduler, Peng et al., SOSP 2019, section 2; P3, Jayarajan et al., MLSys 2019, section 3.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dmltrain.backends.torch.distributed import gates
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.backends.torch.distributed.layout import make_buckets
from dmltrain.backends.torch.distributed.serial import DistributedOptimizer
from dmltrain.errors import UserError
from dmltrain.kvstore import Handle, KVStore


@dataclass(frozen=True)
class Mode:
    """How gradients are combined and when weights are awaited; see `distribute`."""

    average: bool
    overlap: bool
    defer: bool


class OverlappedOptimizer(DistributedOptimizer):
    """Base of OptimizerOnWorkers and OptimizerOnServers. `whole`: each parameter is a key of its own, on one server.
    `mean`: see KVStore.init. `factored`: see make_buckets."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        mode: Mode,
        whole: bool = False,
        mean: bool = False,
        factored: Mapping[torch.nn.Parameter, int] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.store = store
        self._overlap, self._accumulating = mode.overlap, False
        self._pending: dict[Bucket, Handle] = {}  # in the order of the requests
        self._buckets = make_buckets(model, optimizer, store.new_name("bucket"), whole, factored)
        factors = [bucket for bucket in self._buckets if isinstance(bucket, FactoredBucket)]
        pushed = [bucket for bucket in self._buckets if bucket not in factors]
        self._declare(pushed, whole, mean)
        for each in factors:
            each.prepare(store)
        _share_rest(model, self._buckets, store)
        for bucket in self._buckets:
            bucket.watch(self._gradient_ready)
        self._defer = mode.defer and gates.can_have(model)
        if self._defer:
            gates.install(model, self._buckets, self._before_read, self.settle)
        if factors:
            gates.factor(model, factors)

    def _declare(self, buckets: list[Bucket], whole: bool, mean: bool) -> None:
        """Declare the buckets' keys, and take worker 0's weights."""
        keys = [bucket.name for bucket in buckets]
        self.store.init(keys, [bucket.host_weights() for bucket in buckets], whole=whole, mean=mean)
        for bucket, memory in zip(buckets, self.store.buffers(keys), strict=True):
            bucket.lay_out(memory)
        for bucket in buckets:
            weights = bucket.host_weights()
            self.store.pull(bucket.name, weights)
            bucket.set_weights(weights)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("add all parameters to the optimizer before dmltrain.distribute")

    @property
    def state(self) -> Any:  # type: ignore[override]  # read-only here
        self.settle()
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not (self._defer and set_to_none):  # zeros would overwrite gradients that are being sent
            self.settle()
        for bucket in self._buckets:
            bucket.discard()
        self.inner.zero_grad(set_to_none)

    # -- pushing --------------------------------------------------------------------------------------------------

    def push_gradients(self) -> None:
        self.settle()  # buckets whose weights no forward has read since the last step
        for bucket in reversed(self._buckets):
            if not bucket.pushed:
                bucket.complete()
                self._push(bucket)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _gradient_ready(self, bucket: Bucket) -> None:
        if bucket.stepped:
            raise UserError(
                "backward() reached weights without their last step, because they were read outside the model's "
                "forward; call optimizer.settle() before that"
            )
        if bucket.pushed:
            raise UserError(
                "backward() ran twice before step(), and the gradients of the first have already been sent; "
                "put all but the last backward() under `with optimizer.accumulate():`"
            )
        if self._accumulating:
            bucket.accumulate()
        elif bucket.ready and self._overlap:
            self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        raise NotImplementedError

    # -- results --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._wait([bucket for bucket in self._pending if bucket.stepped])

    def _wait(self, buckets: list[Bucket]) -> None:
        """Take the results of these buckets, in the order of arrival."""
        remaining = list(buckets)
        while remaining:
            bucket = self._arrived(remaining) or remaining[0]
            remaining.remove(bucket)
            self._finish(bucket)

    def _before_read(self, bucket: Bucket) -> None:
        """The model's forward is about to read weights of `bucket`."""
        if not bucket.stepped:
            return
        others = [each for each in self._pending if each.stepped and each is not bucket]
        while not arrived(self._pending[bucket]):
            other = self._arrived(others)
            if other is None:
                break
            others.remove(other)
            self._finish(other)
        self._finish(bucket)

    def _arrived(self, buckets: list[Bucket]) -> Bucket | None:
        return next((bucket for bucket in buckets if arrived(self._pending[bucket])), None)

    def _finish(self, bucket: Bucket) -> None:
        handle = self._pending[bucket]
        handle.wait()
        del self._pending[bucket]
        with torch.inference_mode(False):  # an evaluation may call this, but the optimizer's state is for training
            self._take(bucket, handle)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        """The result of `bucket` has arrived."""
        raise NotImplementedError


def arrived(handle: Handle) -> bool:
    """Whether `handle.wait()` would return at once."""
    return handle.done


def _share_rest(model: torch.nn.Module, buckets: list[Bucket], store: KVStore) -> None:
    """Copy worker 0's frozen parameters and floating-point buffers (batch-norm statistics, masks) to all workers."""
    trained = {parameter for bucket in buckets for parameter in bucket.parameters}
    tensors = [
        each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point() and each not in trained
    ]
    if not tensors or store.num_workers == 1:
        return
    with torch.no_grad():
        flat = torch.cat([tensor.double().cpu().reshape(-1) for tensor in tensors])
        own = flat if store.rank == 0 else torch.zeros_like(flat)  # not flat * 0, which makes nan of infinity
        shared = torch.from_numpy(store.all_reduce(store.new_name("first buffers"), own.numpy()))
        for tensor, part in zip(tensors, shared.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
