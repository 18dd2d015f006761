"""Gradients that are sent bucket by bucket, during backward or at step(); results arrive one by one.

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
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from dmltrain.backends.torch.distributed import backward, owners, parameter_hooks, same
from dmltrain.backends.torch.distributed.buckets import EARLY, Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.backends.torch.distributed.gradients.leaving import Leaving
from dmltrain.backends.torch.distributed.gradients.own import OwnGradients
from dmltrain.backends.torch.distributed.gradients.uses import ParameterUses
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.choices import ExchangeChoices


class Destination(Protocol):
    """What an exchange does with a bucket whose gradients are complete."""

    def scale(self) -> float:
        """What gradients are multiplied by before the push."""

    def push(self, bucket: Bucket) -> None:
        """Send the gradients."""

    def is_under_way(self, bucket: Bucket) -> bool:
        """Whether a result of the gradients that were sent is still to come."""

    def take(self, bucket: Bucket, handle: Handle) -> None:
        """The result of `bucket` has arrived."""

    def took(self) -> None:
        """All results that have arrived were taken."""


class PushedGradients(OwnGradients):
    """See the module. `uses`: of gradients that are the mean when backward() ends, in an elastic job. With
    `choices.step_early` gradients are sent during backward, or with `overlap` off by `push`; at the latest at
    step()."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        choices: ExchangeChoices,
        destination: Destination,
        uses: ParameterUses | None = None,
    ) -> None:
        super().__init__(optimizer, buckets)
        self.pending: dict[Bucket, Handle] = {}  # in the order of the requests
        self._destination, self._uses = destination, uses
        self.leaving = Leaving()  # GPUs
        self._overlap, self._early, self._accumulating = choices.overlap, choices.step_early, False
        self._shared = tuple(model.buffers()) if choices.broadcast_buffers else ()  # at each step, from worker 0
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        for bucket in self.buckets if choices.step_early else ():
            self.hooks += bucket.watch(self._gradient_ready)
        self.defers = choices.defer and parameter_hooks.can_have(model)
        if self.defers:
            parameter_hooks.install(model, self.buckets, self._before_read, self.settle)
        self._factored = [bucket for bucket in self.buckets if isinstance(bucket, FactoredBucket)]
        if self._factored:
            parameter_hooks.factor(model, self._factored)

    def release(self) -> None:
        if self._factored:
            raise UserError(
                "a model whose dense layers send factors cannot go through dmltrain.distribute again: leave out factors"
            )
        super().release()

    def zero_grad(self, set_to_none: bool) -> None:
        if not (self.defers and set_to_none):  # setting zeros in place would overwrite gradients that are being sent
            self.settle()
        self._drop()
        for bucket in self.buckets:
            bucket.discard()
        super().zero_grad(set_to_none)

    def _drop(self) -> None:
        """Discard the gradients that were sent. Raises UserError if their results are already under way."""
        self._send_copied(wait=True)
        for bucket in self.buckets:
            if bucket.pushed and not bucket.stepped:
                if self._destination.is_under_way(bucket):
                    raise UserError(
                        "zero_grad() was called between backward() and step(), after gradients had been sent for "
                        f"the step {EARLY}: train without these to skip steps"
                    )
                bucket.begin()

    def weigh(self, weight: float, more: bool = False) -> None:
        super().weigh(weight, more)
        self._accumulating = more

    def rescale(self, factor: float) -> None:
        if not self._early:
            return super().rescale(factor)
        for bucket in self.buckets:
            bucket.weigh(factor)

    # -- pushing --------------------------------------------------------------------------------------------------

    def push(self) -> None:
        if self._is_released:
            raise UserError(owners.REPLACED)
        self.check_complete()
        self.settle()  # buckets whose weights no forward has read since the last step
        for bucket in reversed(self.buckets):
            if not bucket.pushed:
                self._complete(bucket)
                self._push_first(bucket)
        self._send_copied(wait=True)

    def _complete(self, bucket: Bucket) -> None:
        """Before the push: complete the gradients that backward has not produced."""
        if not self._early:
            return bucket.fill()
        if self._uses:
            self._uses.note_unused(bucket)
        else:
            self._check_gradients(bucket)
        bucket.complete()

    def _check_gradients(self, bucket: Bucket) -> None:
        missing = bucket.missing()
        if missing is not None and self.weight != 0.0:
            raise UserError(
                f"parameter {self.names[missing]} has no gradient at step(), and would be stepped with zeros {EARLY}: "
                "train without these, or freeze the parameter (requires_grad_(False)) before dmltrain.distribute"
            )

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
            return bucket.accumulate()
        if bucket.ready and self._overlap:
            self._push_first(bucket)
        if self._uses:
            backward.reached(self._uses)

    def _push_first(self, bucket: Bucket) -> None:
        with torch.no_grad():
            if self._early:
                bucket.gather()
            bucket.weigh(self.weight)
            bucket.weigh(self._destination.scale())
        if bucket.freeze():
            bucket.pushed = True
            self.leaving.add(bucket)
        else:
            self._destination.push(bucket)
        self._send_copied(wait=False)

    def _send_copied(self, wait: bool) -> None:
        """Send the gradients that are on the host by now, or `wait` for all."""
        for bucket in self.leaving.arrived(wait):
            self._destination.push(bucket)

    def share_buffers(self, store: KVStore) -> None:
        """With broadcast_buffers: give all workers worker 0's buffers."""
        if self._shared:
            same.share(store, self._shared)

    # -- results --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.wait([bucket for bucket in self.pending if bucket.stepped])

    def wait(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Take the results of these buckets, in the order of arrival; by default of all that are pending."""
        remaining = list(self.pending if buckets is None else buckets)
        while remaining:
            bucket = self._arrived(remaining) or remaining[0]
            remaining.remove(bucket)
            self._finish(bucket)
        self._took()

    def _before_read(self, bucket: Bucket) -> None:
        """The model's forward is about to read weights of `bucket`."""
        if not bucket.stepped:
            return
        others = [pending for pending in self.pending if pending.stepped and pending is not bucket]
        while not arrived(self.pending[bucket]):
            other = self._arrived(others)
            if other is None:
                break
            others.remove(other)
            self._finish(other)
        self._finish(bucket)
        if bucket.on_gpu:  # one kernel steps all that have arrived
            for other in [other for other in others if arrived(self.pending[other])]:
                self._finish(other)
        self._took()

    def _arrived(self, buckets: list[Bucket]) -> Bucket | None:
        return next((bucket for bucket in buckets if arrived(self.pending[bucket])), None)

    def _finish(self, bucket: Bucket) -> None:
        handle = self.pending[bucket]
        handle.wait()
        del self.pending[bucket]
        with torch.inference_mode(False):  # an evaluation may call this, but the optimizer's state is for training
            self._destination.take(bucket, handle)

    def _took(self) -> None:
        with torch.inference_mode(False):
            self._destination.took()

    def forget(self) -> None:
        """Forget what was sent, and all gradients."""
        self.pending.clear()
        self.leaving.forget()
        for bucket in self.buckets:
            bucket.begin()


def arrived(handle: Handle) -> bool:
    """Whether `handle.wait()` would return at once."""
    return handle.done
