"""The base of both optimizers that send gradients: buckets are pushed during backward, and results arrive one by one.

A bucket is pending from its push (with the optimizer on the servers: from its pull) until its result is taken. After
`step()` it is `stepped`: its weights may be read only after it is settled. There are two ways to wait:

- `settle` waits for all stepped buckets, where it is not known which weights are read next.
- With `defer`, the model's forward waits for a bucket just before it first reads one of its parameters
  (parameter_hooks.py). In this time it settles buckets that have arrived, so that the optimizer runs while the worker
  would wait.
  (ByteScheduler, Peng et al., SOSP 2019, section 2; P3, Jayarajan et al., MLSys 2019, section 3.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dmltrain.backends.torch.distributed import parameter_hooks, same
from dmltrain.backends.torch.distributed.bucketed import BucketedOptimizer
from dmltrain.backends.torch.distributed.buckets import EARLY, Bucket
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.choices import ExchangeChoices


class OverlappedOptimizer(BucketedOptimizer):
    """Base of EarlyOptimizer and OptimizerOnServers. `whole`, `mean` and `factored`: see BucketedOptimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        choices: ExchangeChoices,
        whole: bool = False,
        mean: bool = False,
        factored: Mapping[torch.nn.Parameter, int] | None = None,
    ) -> None:
        super().__init__(model, optimizer, store, whole, mean, factored)
        self._overlap, self._accumulating = choices.overlap, False
        self._shared = tuple(model.buffers()) if choices.broadcast_buffers else ()  # at each step, from worker 0
        self._pending: dict[Bucket, Handle] = {}  # in the order of the requests
        self._early = choices.step_early
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        for bucket in self._buckets if choices.step_early else ():
            self._hooks += bucket.watch(self._gradient_ready)
        self._defer = choices.defer and parameter_hooks.can_have(model)
        if self._defer:
            parameter_hooks.install(model, self._buckets, self._before_read, self.settle)
        if self._factored:
            parameter_hooks.factor(model, self._factored)

    @property
    def state(self) -> Any:  # type: ignore[override]  # read-only here
        self.settle()
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not (self._defer and set_to_none):  # setting zeros in place would overwrite gradients that are being sent
            self.settle()
        self._drop()
        for bucket in self._buckets:
            bucket.discard()
        self.inner.zero_grad(set_to_none)

    def _drop(self) -> None:
        """Discard the gradients that were sent. Raises UserError if their results are already under way."""
        for bucket in self._buckets:
            if bucket.pushed and not bucket.stepped:
                if self._is_under_way(bucket):
                    raise UserError(
                        "zero_grad() was called between backward() and step(), after gradients had been sent for "
                        f"the step {EARLY}: train without these to skip steps"
                    )
                bucket.begin()

    def _is_under_way(self, bucket: Bucket) -> bool:
        """Whether a result of the gradients that were sent is still to come."""
        return bucket in self._pending

    def weigh(self, weight: float, more: bool = False) -> None:
        super().weigh(weight, more)
        self._accumulating = more

    def rescale(self, factor: float) -> None:
        if not self._early:
            return super().rescale(factor)
        for bucket in self._buckets:
            bucket.weigh(factor)

    # -- pushing --------------------------------------------------------------------------------------------------

    def push_gradients(self) -> None:
        self._check_owner()
        self._check_complete()
        self.settle()  # buckets whose weights no forward has read since the last step
        for bucket in reversed(self._buckets):
            if not bucket.pushed:
                self._complete(bucket)
                self._push_first(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Before the push: complete the gradients that backward has not produced."""
        if not self._early:
            return bucket.fill()
        missing = bucket.missing()
        if missing is not None and self._weight != 0.0:
            raise UserError(
                f"parameter {self._names[missing]} has no gradient at step(), and would be stepped with zeros {EARLY}: "
                "train without these, or freeze the parameter (requires_grad_(False)) before dmltrain.distribute"
            )
        bucket.complete()

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
                "backward() ran twice before step(), and the gradients of the first have already been sent; put all "
                "but the last under `with optimizer.accumulate():` (and give checkpoint() use_reentrant=False)"
            )
        if self._accumulating:
            bucket.accumulate()
        elif bucket.ready and self._overlap:
            self._push_first(bucket)

    def _push_first(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.weigh(self._weight)
        self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def _share_buffers(self) -> None:
        """With broadcast_buffers: give all workers worker 0's buffers."""
        if self._shared:
            same.share(self.store, self._shared)

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
        others = [pending for pending in self._pending if pending.stepped and pending is not bucket]
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
