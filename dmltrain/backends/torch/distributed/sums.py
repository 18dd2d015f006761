"""Servers sum gradients, which were sent during backward, and workers make the step with any optimizer of torch.

Nothing may read or change gradients before step(). If the optimizer treats parameters independently, its step is made
in parts: each bucket is stepped as soon as its sum has arrived. The results are bit-identical to those of a whole step,
and fused kernels stay fused (parts.py).

In an elastic job this worker only receives the sums until the round is recognised (members.py), and changes neither
gradients nor weights; then it makes the step. Without `step_early` the round is made when the outermost backward()
returns: gradients are then the mean, and the script may change them. The gradient of a parameter that no worker has
used is None (gradients/uses.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed.buckets import EARLY, Bucket, arrival, note_last_use, with_gradients
from dmltrain.backends.torch.distributed.choice import NOTHING_CHOSEN, Chosen
from dmltrain.backends.torch.distributed.exchange import Exchange, evaluated
from dmltrain.backends.torch.distributed.gradients.leaving import Arriving
from dmltrain.backends.torch.distributed.gradients.pushes import PushedGradients
from dmltrain.backends.torch.distributed.gradients.uses import ParameterUses
from dmltrain.backends.torch.distributed.layout import declared
from dmltrain.backends.torch.distributed.members import RECEIPT, Members
from dmltrain.backends.torch.distributed.parts import changes_gradients, check_closure, step_options, step_parameters
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle, KVStore, ViewChanged
from dmltrain.kvstore.choices import ExchangeChoices


class GradientSums(Exchange):
    """See the module. In an elastic job `round` comes before each `step`, and with `choices.average` sums are divided
    by the number of workers at the job's start, which is what `weigh` expects."""

    store: KVStore
    gradients: PushedGradients

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        choices: ExchangeChoices,
        chosen: Chosen = NOTHING_CHOSEN,
    ) -> None:
        check_closure(optimizer)
        members = Members(store, "receipt")
        buckets = declared(model, optimizer, store, mean=choices.average and not members.elastic, factored=chosen.rows)
        self._uses: ParameterUses | None = None
        if members.elastic:
            store.init([members.key], [np.zeros(RECEIPT)])
            self._uses = None if choices.step_early else ParameterUses(store, buckets, self.reduce_gradients)
            choices = replace(choices, defer=False)
        choices = replace(choices, step_early=True)
        super().__init__(PushedGradients(model, optimizer, buckets, choices, self, self._uses), store, members)
        self.chosen = chosen
        self._factors_to_mean = {bucket: bucket.factor_to_mean(store) if choices.average else 1.0 for bucket in buckets}
        self._groups: list[dict[str, Any]] | None = None  # the options of the step whose buckets are pending
        self._factor = 1.0  # of that step
        self._arriving, self._arrived = Arriving(), list[Bucket]()  # on a GPU; `took` makes their step
        self._is_reduced = False  # the gradients are those of the recognised round of an elastic job
        in_buckets = {parameter for bucket in buckets for parameter in bucket.parameters}
        self._frozen = [parameter for parameter in self.gradients.parameters() if parameter not in in_buckets]

    @property
    def state(self) -> Any:
        self.gradients.settle()
        return self.inner.state

    # -- what becomes of a bucket ---------------------------------------------------------------------------------

    def push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        try:
            self.gradients.pending[bucket] = bucket.send(self.store)
        except ViewChanged:  # backward goes on, and step() pushes again
            self.gradients.pending[bucket] = _interrupted()

    def is_under_way(self, bucket: Bucket) -> bool:
        if self._is_reduced:
            raise UserError(
                "zero_grad() was called between backward() and step(): an elastic job exchanges gradients once for "
                "each batch of dmltrain.loader, so call backward() once for it, and all others under "
                "`with optimizer.accumulate():`"
            )
        return bucket in self.gradients.pending

    def take(self, bucket: Bucket, handle: Handle) -> None:
        factor = self._factors_to_mean[bucket] * self._factor
        if bucket.stepped:
            bucket.check_unchanged()
        if bucket.host.arriving:
            self._arriving.add(arrival(bucket, factor))
        elif not bucket.stepped:
            bucket.take_result(handle, factor)
        elif bucket.on_gpu:
            bucket.receive(handle, factor)
        if bucket.on_gpu and bucket.stepped:
            self._arrived.append(bucket)
        if bucket.on_gpu or not bucket.stepped:
            return
        assert self._groups is not None  # _step_buckets sets `stepped` only if there are options for a step in parts
        options = self._groups[bucket.group]
        with bucket.result_in_place(handle, factor, copied=changes_gradients(options)):
            step_parameters(self.inner, options, bucket.parameters)
        bucket.begin()

    def took(self) -> None:
        """Step the buckets on GPUs whose results have arrived, those of a group with one call of the optimizer."""
        self._arriving.finish()
        arrived, self._arrived = self._arrived, []
        for group in sorted({bucket.group for bucket in arrived}):
            assert self._groups is not None  # as in `take`
            own = [bucket for bucket in arrived if bucket.group == group]
            parameters = [parameter for bucket in own for parameter in bucket.parameters]
            with with_gradients(parameters, [view for bucket in own for view in bucket.views]):
                step_parameters(self.inner, self._groups[group], parameters)
        for bucket in arrived:
            bucket.begin()

    def _push_all(self) -> None:
        if any(parameter.grad is not None for parameter in self._frozen):
            raise UserError(
                "a parameter that was frozen at dmltrain.distribute has a gradient now, which is this worker's own "
                f"{EARLY}: train without these, or call dmltrain.distribute again after unfreezing"
            )
        self.gradients.push()
        for bucket in self.gradients.pending:
            bucket.check_unchanged()

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if not self._is_reduced:
            self.members.check()
            if self._uses and closure is None:
                self.reduce_gradients()
        if self._is_reduced and not self._has_samples:
            self.forget_round()  # no gradient has come, or the result of the step is here already
        else:
            loss = evaluated(closure)
            self._push_all()
            self.gradients.share_buffers(self.store)
            self._step_all()
        self.members.tell()
        return loss

    @property
    def _has_samples(self) -> bool:
        """Whether there are samples in the round that was recognised last."""
        return self.members.committed is not None and bool(self.members.committed[0])

    def _step_all(self) -> None:
        if not self.members.elastic:
            return self._step_buckets(1.0)
        factor = 1.0 if self._is_reduced else self._committed_factor()
        self._is_reduced = False
        if not self._has_samples:
            return self.forget_round()  # even a step with zeros would move weights: momentum, weight decay
        with self.members.rates(self.inner.param_groups):
            self._step_buckets(factor)

    def _step_buckets(self, factor: float) -> None:
        """Step all buckets with their results times `factor`: each as its result arrives, or with `defer` later."""
        self._groups, self._factor = self._options_of_parts(), factor
        if self._groups is None:
            self.gradients.wait()
            self.inner.step()
            for bucket in self.gradients.buckets:
                bucket.begin()
            return
        note_last_use(self.gradients.buckets)
        for bucket in self.gradients.buckets:
            bucket.stepped = True
        if not self.gradients.defers:
            self.gradients.wait()

    def _options_of_parts(self) -> list[dict[str, Any]] | None:
        """The groups' options for a step in parts; None if all parameters must be stepped at once."""
        if len(self.gradients.pending) < len(self.gradients.buckets):
            return None
        if not all(bucket.has_gradients for bucket in self.gradients.buckets):
            return None
        return step_options(self.inner)

    def reduce_gradients(self) -> None:
        """In an elastic job: wait until the round is recognised. Makes no step."""
        if self._is_reduced:
            return
        self.members.check()
        self._push_all()
        if self.members.elastic:
            self._factor, self._is_reduced = self._committed_factor(), True
        self.gradients.wait()
        if self._uses:
            self._uses.apply()

    # -- rounds of an elastic job ---------------------------------------------------------------------------------

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        self.members.begin(dealt, checksum, then)

    def skip_round(self) -> bool:
        """Returns True if the round was recognised."""
        if not self._is_reduced:
            return False
        self.forget_round()
        self.members.tell()
        return True

    def forget_round(self) -> None:
        if not self.members.elastic:
            return
        self._is_reduced = False
        self.members.forget()
        if self._uses:
            self._uses.forget()
        self.gradients.forget()

    def _committed_factor(self) -> float:
        """Wait until the round is recognised. Returns the number of samples that were dealt, divided by the number
        whose gradients have come; 0 if none have."""
        total = self.members.recognised(self._attempt, self._push_again)
        if total is None:
            self.forget_round()  # only the others have the sum
        self.members.end(total)
        used = int(total[0]) if total is not None else 0
        return self.members.dealt / used if used else 0.0

    def _attempt(self) -> Array:
        """Wait for the sums in the present view, and until the round is recognised. Returns the sum of checksums."""
        total = self.store.pushpull(self.members.key, self.members.checksum, READ, wait=False)
        uses = self._uses.send(self.gradients.weight) if self._uses else total
        for handle in (*self.gradients.pending.values(), total, uses):
            handle.wait()
        self.store.complete()
        if self._uses:
            self._uses.take(uses)
        return np.array(total.values[0])

    def _push_again(self) -> None:
        for bucket in reversed(self.gradients.buckets):
            self.push(bucket)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.gradients.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.gradients.settle()
        super().load_state_dict(state_dict)


def _interrupted() -> Handle:
    """The handle of a push that was not made: waiting for it raises ViewChanged."""
    handle = Handle(1, "push", 0.0)
    handle.interrupt()
    return handle
