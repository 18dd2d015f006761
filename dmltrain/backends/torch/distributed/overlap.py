"""What both kinds of distributed optimizers share: buckets that leave during backward, and come back one by one.

A bucket is under way from its push (or, with the optimizer on the servers, its pull) until its result is taken. After
`step()` it is `stepped`: it has to be settled before anybody reads its weights. Who waits for it, and when:

- everybody at once: `settle`, called by whatever cannot know which weights are read next;
- deferred: the model's forward, just before it first reads a parameter of the bucket (gates.py). While the one
  that is needed next has not come, those that have are settled: waiting time pays for the optimizer's time.
  (ByteScheduler, Peng et al., SOSP 2019, section 2; P3, Jayarajan et al., MLSys 2019, section 3.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from dmltrain.backends.torch.distributed import gates as torch_gates
from dmltrain.backends.torch.distributed.buckets import Bucket, make_buckets
from dmltrain.backends.torch.distributed.serial import DistributedOptimizer
from dmltrain.errors import UserError
from dmltrain.kvstore import Handle, KVStore


class OverlappedOptimizer(DistributedOptimizer):
    """Parent of the optimizer on the workers and of that on the servers. `defer`: see the module."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        average: bool,
        overlap: bool,
        defer: bool,
    ) -> None:
        super().__init__(optimizer)
        self.store = store
        self._average, self._overlap, self._holding = average, overlap, False
        self._under_way: dict[Bucket, Handle] = {}  # in the order of departure
        self._buckets = make_buckets(model, optimizer, store.new_name("bucket"))
        self._keys = [bucket.name for bucket in self._buckets]
        store.init(self._keys, [bucket.host_weights() for bucket in self._buckets])
        for bucket, memory in zip(self._buckets, store.buffers(self._keys), strict=True):
            bucket.lay_out(memory)
        self._take_first_weights()
        _share_rest(model, self._buckets, store)
        for bucket in self._buckets:
            bucket.watch(self._gradient_ready)
        self._defer = defer and torch_gates.can_have(model)
        if self._defer:
            torch_gates.install(model, self._buckets, self._pass, self.settle)

    def _take_first_weights(self) -> None:
        for bucket in self._buckets:
            weights = bucket.host_weights()
            self.store.pull(bucket.name, weights)
            bucket.set_weights(weights)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("add all parameters to the optimizer before dmltrain.distribute")

    @property
    def state(self) -> Any:  # type: ignore[override]  # nobody assigns it
        self.settle()
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not (self._defer and set_to_none):  # zeros would be written into memory that is under way
            self.settle()
        self.inner.zero_grad(set_to_none)

    # -- pushing --------------------------------------------------------------------------------------------------

    def push_gradients(self) -> None:
        self.settle()  # a bucket whose weights no forward has read since the last step
        for bucket in reversed(self._buckets):
            if not bucket.pushed:
                bucket.complete()
                self._push(bucket)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def _gradient_ready(self, bucket: Bucket) -> None:
        if bucket.stepped:
            raise UserError(
                "backward() came to weights that do not have their last step yet: they were read outside "
                "the model's forward; call optimizer.settle() before that"
            )
        if bucket.pushed:
            raise UserError(
                "backward() ran twice before step(): its first gradients have been sent already; "
                "put all but the last backward() under `with optimizer.accumulate():`"
            )
        if self._holding:
            bucket.begin()  # the gradients that count as the last are those of a later backward
        elif bucket.ready and self._overlap:
            self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        raise NotImplementedError

    # -- results --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._wait([bucket for bucket in self._under_way if bucket.stepped])

    def _wait(self, buckets: list[Bucket]) -> None:
        """Take the results of these, what has come first."""
        left = list(buckets)
        while left:
            bucket = self._arrived(left) or left[0]
            left.remove(bucket)
            self._finish(bucket)

    def _pass(self, bucket: Bucket) -> None:
        """The model's forward is about to read weights of `bucket`."""
        if not bucket.stepped:
            return
        others = [each for each in self._under_way if each.stepped and each is not bucket]
        while not arrived(self._under_way[bucket]):
            other = self._arrived(others)
            if other is None:
                break
            others.remove(other)
            self._finish(other)
        self._finish(bucket)

    def _arrived(self, buckets: list[Bucket]) -> Bucket | None:
        return next((bucket for bucket in buckets if arrived(self._under_way[bucket])), None)

    def _finish(self, bucket: Bucket) -> None:
        handle = self._under_way[bucket]
        handle.wait()
        del self._under_way[bucket]
        with torch.inference_mode(False):  # an evaluation may be what asks; the optimizer's state is made for training
            self._take(bucket, handle)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        """The result of `bucket` has arrived."""
        raise NotImplementedError


def arrived(handle: Handle) -> bool:
    """Whether `handle.wait()` would return at once."""
    return handle.done


def _share_rest(model: torch.nn.Module, buckets: list[Bucket], store: KVStore) -> None:
    """Worker 0's frozen parameters and floating-point buffers (batch-norm statistics, masks) for everybody."""
    trained = {parameter for bucket in buckets for parameter in bucket.parameters}
    tensors = [
        each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point() and each not in trained
    ]
    if not tensors or store.num_workers == 1:
        return
    with torch.no_grad():
        flat = torch.cat([tensor.double().cpu().reshape(-1) for tensor in tensors])
        own = flat if store.rank == 0 else torch.zeros_like(flat)  # not flat * 0: infinity would become nan
        shared = torch.from_numpy(store.all_reduce(store.new_name("first buffers"), own.numpy()))
        for tensor, part in zip(tensors, shared.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
