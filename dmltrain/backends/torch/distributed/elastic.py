"""The optimizer on the workers of an elastic job, whose members may change in the middle of a step.

Until the store has recognised the round, this worker only receives the gradients' sums, and changes neither gradients
nor weights. If the members change before that, the remaining ones push the same gradients again. So a round is made by
all members that stay in the job, or by none. A worker that cannot get the sums, because a server was lost, gets the
result of the step from another worker.

Each worker also pushes a checksum of its samples. The sum of the checksums says of how many samples the gradients have
arrived: fewer than were dealt if a worker was lost.

Without early steps the round is made when the outermost backward() returns: gradients are then the mean, and the script
may change them. The gradient of a parameter that no worker has used is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed import backward
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.early import EarlyOptimizer
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle, KVStore, ViewChanged
from dmltrain.kvstore.choices import ExchangeChoices

RECEIPT = 3  # numbers


class ElasticOptimizer(EarlyOptimizer):
    """See the module. `round` comes before each `step`. With `choices.average` sums are divided by the number of
    workers at the job's start, which is what `weigh` expects."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        choices: ExchangeChoices,
    ) -> None:
        super().__init__(model, optimizer, store, replace(choices, defer=False, step_early=True))
        backward.install()
        self.number = backward.next_number()
        self._reduces_in_backward = not choices.step_early
        self._unused: set[torch.nn.Parameter] = set()  # by this worker, in this round
        self._order = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self._uses_of_all: Array = np.ones(len(self._order))  # workers that have used each parameter
        self._round: tuple[int, Array] | None = None
        self._after_step: Callable[[Array], None] | None = None
        self._is_reduced = False  # the gradients are those of the recognised round
        self._checksums = store.new_name("receipt")
        store.init([self._checksums], [np.zeros(RECEIPT)])
        self._uses = store.new_name("uses of parameters")
        if self._reduces_in_backward:
            store.init([self._uses], [np.zeros(len(self._order))])

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        self._round, self._after_step = (dealt, np.array(checksum, np.float64)), then

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises what `KVStore.enter` raises, if this worker is no longer a member of the job."""
        loss = None
        if not self._is_reduced:
            self._check_round()
            if self._reduces_in_backward and closure is None:
                self.reduce_gradients()
        if self._is_reduced and self.committed is not None and not self.committed[0]:
            self.forget_round()  # no gradient has come, or the result of the step is here already
        else:
            loss = super().step(closure)
        if then := self._after_step:
            assert self.committed is not None  # by _step_all
            then(self.committed)
        return loss

    def skip_round(self) -> bool:
        """See the base class. Returns True if the round was recognised."""
        if not self._is_reduced:
            return False
        self.forget_round()
        if (then := self._after_step) and self.committed is not None:
            then(self.committed)
        return True

    # -- gradients when backward() returns ------------------------------------------------------------------------

    def _gradient_ready(self, bucket: Bucket) -> None:
        super()._gradient_ready(bucket)
        if self._reduces_in_backward and not self._accumulating:
            backward.reached(self)

    def finish(self) -> None:
        """An outermost backward() has ended."""
        self.reduce_gradients()

    def failed(self, error: BaseException) -> None:
        """Gradients that were sent cannot be taken back; zero_grad() raises the error."""

    def _complete(self, bucket: Bucket) -> None:
        if not self._reduces_in_backward:
            return super()._complete(bucket)
        self._unused |= {parameter for parameter in bucket.parameters if parameter.grad is None}
        bucket.complete()

    def _drop(self) -> None:
        if self._is_reduced:
            raise UserError(
                "zero_grad() was called between backward() and step(): an elastic job exchanges gradients once for "
                "each batch of dmltrain.loader, so call backward() once for it, and all others under "
                "`with optimizer.accumulate():`"
            )
        super()._drop()

    def _forget_unused(self) -> None:
        for parameter, count in zip(self._order, self._uses_of_all, strict=True):
            if not count:
                parameter.grad = None

    def _used(self) -> Array:
        """1.0 for each parameter that this worker's part of the round has used, else 0.0: (parameters,)."""
        if self._weight == 0.0:
            return np.zeros(len(self._order))
        return np.array([parameter not in self._unused for parameter in self._order], np.float64)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _check_round(self) -> None:
        check_round(self._round is not None)

    def forget_round(self) -> None:
        """Make no step with the gradients of the last backward."""
        self._round, self._is_reduced = None, False
        self._unused.clear()
        self._pending.clear()
        for bucket in self._buckets:
            bucket.begin()

    def reduce_gradients(self) -> None:
        """Wait until the round is recognised: all workers that stay in the job then have the same gradients. Makes no
        step."""
        if self._is_reduced:
            return
        self._check_round()
        self._push_all()
        self._factor, self._is_reduced = self._committed_factor(), True
        self._wait(list(self._pending))
        if self._reduces_in_backward:
            self._forget_unused()
            self._unused.clear()

    def _push(self, bucket: Bucket) -> None:
        try:
            super()._push(bucket)
        except ViewChanged:  # backward goes on, and step() pushes again
            self._pending[bucket] = _interrupted()

    def _step_all(self, factor: float = 1.0) -> None:
        if not self._is_reduced:
            factor *= self._committed_factor()
        self._is_reduced = False
        assert self.committed is not None
        if self.committed[0]:
            with self._multiplied_rates():
                return super()._step_all(factor)
        self.forget_round()  # even a step with zeros would move weights: momentum, weight decay

    def _committed_factor(self) -> float:
        """Wait until the round is recognised. Returns the number of samples that were dealt, divided by the number
        whose gradients have come; 0 if none have."""
        assert self._round is not None  # see step
        dealt, checksum = self._round
        checksums = self._commit(checksum)
        if checksums is None:
            self.forget_round()
            checksums = np.zeros(RECEIPT)  # only the others have the sum
        self._round, self.committed = None, checksums
        used = int(self.committed[0])
        return dealt / used if used else 0.0

    def _commit(self, checksum: Array) -> Array | None:
        """Wait until the round is recognised. Returns the sum of its checksums; None if other workers have made the
        step, and its result is here already."""
        while True:
            try:
                handle = self.store.pushpull(self._checksums, checksum, READ, wait=False)
                uses = (
                    self.store.pushpull(self._uses, self._used(), READ, wait=False)
                    if self._reduces_in_backward
                    else handle
                )
                for pending in (*self._pending.values(), handle, uses):
                    pending.wait()
                self.store.complete()
                self._uses_of_all = np.array(uses.values[0])
                return np.array(handle.values[0])
            except ViewChanged:
                if self.store.enter():
                    return None
                for bucket in reversed(self._buckets):
                    self._push(bucket)


def check_round(is_known: bool) -> None:
    """Raise UserError unless `round` has come before this step."""
    if not is_known:
        raise UserError(
            "in an elastic job each step() needs to know its samples: make one step for each batch of a "
            "dmltrain.loader (docs/elastic-scripts.md), or start the job without --elastic"
        )


def _interrupted() -> Handle:
    """The handle of a push that was not made: waiting for it raises ViewChanged."""
    handle = Handle(1, "push", 0.0)
    handle.interrupt()
    return handle
