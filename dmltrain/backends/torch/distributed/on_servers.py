"""The optimizer on the servers: dist_async, dist_ssp, and dist_sync with update_on_kvstore.

Each worker pushes its own gradients, and pulls weights. There are two ways:
- `step()` pushes the gradients of that moment, and returns when the pulled weights are in the model. The servers own
  the weights, so `step()` raises an error if the script has changed weights since.
- Early: gradients are pushed during backward, and weights are pulled into the memory of the model's parameters. The
  next forward waits for them. The script must not change gradients or weights.

In an elastic job gradients are pushed early, and weights are pulled into separate memory. They are copied to the model
when the round is recognised (members.py). If the members change before that, the servers undo their steps of the round.
Servers add gradients and know nothing of samples. So the workers agree on the number first: each sends its checksum
when the round begins. When all checksums have come, each worker pushes its gradients, multiplied by (samples dealt /
samples in the checksums). Usually the two are equal, and the checksums arrive before the first gradient is ready.

Between two steps the kvstore may change to another of these types (KVStore.between_steps; in an elastic job with a
view). Workers that step alone agree on nothing: each pushes its gradients as soon as they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed import parameter_hooks
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.exchange import Exchange, evaluated
from dmltrain.backends.torch.distributed.gradients.leaving import Arriving
from dmltrain.backends.torch.distributed.gradients.pushes import PushedGradients
from dmltrain.backends.torch.distributed.layout import declared
from dmltrain.backends.torch.distributed.members import Members
from dmltrain.backends.torch.distributed.server_state import (
    ORDERS,
    SERVERS,
    check_orders,
    options_of_keys,
    orders,
)
from dmltrain.backends.torch.distributed.untouched import Untouched
from dmltrain.backends.torch.optimizer import row_of
from dmltrain.backends.torch.server_optimizer import make_spec
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle, KVStore, ViewChanged
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.kvstore.types import KVStoreType
from dmltrain.kvstore.worker.elastic_ops import ElasticOps


class StepsOnServers(Exchange):
    """See the module. Without `defer` the model's forward starts after all weights have arrived. In an elastic job
    `round` comes before each step. With `choices.average` servers divide by the number of workers at the job's start,
    which is what `weigh` expects."""

    store: KVStore
    gradients: PushedGradients

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, choices: ExchangeChoices
    ) -> None:
        row = row_of(optimizer)
        buckets = declared(model, optimizer, store, whole=row is not None and not row.elementwise)
        choices = replace(choices, defer=choices.defer and not store.elastic)
        members = Members(store, "receipts")
        super().__init__(PushedGradients(model, optimizer, buckets, choices, self), store, members)
        self._early, self._arriving = choices.step_early, Arriving()
        self._workers = store.num_workers if choices.average else 1  # at the job's start
        self._factor = _factor(store.kvstore_type, self._workers)
        store.set_optimizer(make_spec(optimizer, options_of_keys(store, optimizer, buckets), self._factor))
        refusal = _refusal(optimizer) if row is not None and row.needs_pulled else ""
        store.follow_changes([bucket.name for bucket in buckets], lambda kind: refusal if kind.synchronous else "")
        self._untouched = Untouched(self.gradients, store)
        self._place_weights(model)
        self._elastic = store.ops if isinstance(store.ops, ElasticOps) else None
        if self._elastic:
            steps = self._elastic.steps
            steps.weights = lambda: {bucket.name: bucket.weights.on_host() for bucket in buckets}
            steps.take_weights = self.synchronize

    def _place_weights(self, model: torch.nn.Module) -> None:
        """Make memory for pulled weights, and let the model wait for them."""
        for bucket in self.gradients.buckets:
            if self._early:
                bucket.weights.adopt(bucket.host.encodings)
            else:
                bucket.weights.pulled = bucket.weights.on_host()
        if not self._early:
            self.gradients.hooks += self._untouched.watch()
        elif not self.gradients.defers:
            parameter_hooks.before_forward(model, self.gradients.settle, self.gradients.settle)

    def _scale(self) -> float:
        """What corrects gradients after a change of the kvstore's type: the servers' factor is that of the start."""
        return _factor(self.store.kvstore_type, self._workers) / self._factor

    def reduce_gradients(self) -> None:
        raise UserError(
            "the optimizer runs on the servers, so no worker has the mean of all workers' gradients: to clip or scale "
            "it, run the optimizer on the workers (dist_sync without update_on_kvstore)"
        )

    # -- what becomes of a bucket ---------------------------------------------------------------------------------

    def push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        if self.members.elastic:
            return self._push_in_view(bucket)
        rate = float(self.inner.param_groups[bucket.group]["lr"])
        self.store.push(bucket.name, bucket.host_gradients(), bucket.priority, rate)

    def scale(self) -> float:
        return 1.0 if self.members.elastic else self._scale()

    def is_under_way(self, bucket: Bucket) -> bool:
        return True  # servers make the step

    def take(self, bucket: Bucket, handle: Handle) -> None:
        if not self._early:
            bucket.weights.set(torch.from_numpy(bucket.weights.pulled))
        elif bucket.on_gpu:
            self._arriving.add(bucket.weights.arrival())
        bucket.begin()

    def took(self) -> None:
        self._arriving.finish()

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        self._untouched.check_settings()
        if self.members.elastic:
            self._step_with_members()
        else:
            self._step()
        return loss

    def _step(self) -> None:
        self._untouched.check(self._early)
        self.gradients.push()
        self._untouched.sent()
        self.gradients.share_buffers(self.store)
        self._pull()
        if not self._early:
            self.gradients.settle()
        self.store.between_steps(self.gradients.settle)

    def _pull(self) -> None:
        for bucket in self.gradients.buckets:
            bucket.stepped = True
            handle = self.store.pull(bucket.name, bucket.weights.out, bucket.priority, wait=False)
            self.gradients.pending[bucket] = handle

    def synchronize(self) -> None:
        """In a view of an elastic job weights of all workers that step together always include the last step. Workers
        that step alone take the servers' present weights, with two exceptions. While this worker gives its state to a
        newcomer, it keeps the weights of its own last step. Between two epochs it keeps those of the epoch's end: a
        pull there could make it enter a view, and it would not know that others have begun the next epoch."""
        ops = self._elastic
        if ops and ops.view:
            if not (self.members.together or ops.entry.collecting or ops.entry.training.between_epochs()):
                ops.repeat(self._refresh_in_view)
            return
        self.gradients.settle()
        if not self._early:
            self._untouched.check_weights()
        self._pull()
        self.gradients.settle()

    # -- steps of an elastic job ----------------------------------------------------------------------------------

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        self.members.begin(dealt, checksum, then)
        if self.members.elastic and self.members.together:
            try:
                self.members.sum_checksums()
            except ViewChanged:  # step() asks again
                self.members.begin_again()

    def forget_round(self) -> None:
        if self.members.elastic:
            self.members.forget()
            self.gradients.forget()

    def _step_with_members(self) -> None:
        """Push the buckets that are not pushed yet, and wait until the round is recognised, or for the weights if this
        worker steps alone. If others have made the step, this one has its result already."""
        self.members.check()
        self.gradients.push()
        together = self.members.together
        made = self.members.recognised(self._attempt if together else lambda: (self.members.checksum, self._exchange()))
        total, pulled = made or (None, {})
        if pulled and self._elastic:
            self._take_all(pulled)
            self._elastic.stepped()
        self.members.end(total)
        self.forget_round()
        self.members.tell()

    def _attempt(self) -> tuple[Array, dict[Bucket, Handle]]:
        """Make a round in the present view. Returns the sum of its checksums, and the new weights."""
        checksums = self.members.sum_checksums()
        checksums.wait()
        total = np.array(checksums.values[0])
        pulled = self._exchange() if total[0] else {}
        self.store.complete()
        return total, pulled

    def _exchange(self) -> dict[Bucket, Handle]:
        """Push all gradients, and wait for the weights after the step."""
        for bucket in reversed(self.gradients.buckets):
            self._send(bucket)
        return self._pulled()

    def _pulled(self) -> dict[Bucket, Handle]:
        """The servers' weights, in separate memory."""
        pulled = {}
        for bucket in self.gradients.buckets:
            out = bucket.weights.out if bucket.on_gpu else READ
            pulled[bucket] = self.store.pull(bucket.name, out, bucket.priority, wait=False)
        for handle in pulled.values():
            handle.wait()
        return pulled

    def _take_all(self, pulled: dict[Bucket, Handle]) -> None:
        """Copy the new weights to the model."""
        for bucket, handle in pulled.items():
            if bucket.on_gpu:
                self._arriving.add(bucket.weights.arrival())
            else:
                np.copyto(bucket.weights.pulled, handle.values[0])
        self._arriving.finish()

    def _refresh_in_view(self) -> None:
        self._take_all(self._pulled())
        if self._elastic:
            self._elastic.steps.refreshed()

    def _push_in_view(self, bucket: Bucket) -> None:
        """Push the gradients now if their factor is known; else step() does."""
        try:
            if not self.members.together or self.members.has_samples():
                self._send(bucket)
        except ViewChanged:  # step() pushes it again
            self.members.begin_again()

    def _send(self, bucket: Bucket) -> None:
        """Push the gradients of a bucket, unless they were pushed in this view."""
        self.members.follow_view()
        if bucket in self.members.sent:
            return
        rate = float(self.inner.param_groups[bucket.group]["lr"]) * self.members.rate_factor
        # The step uses the mean over the samples of the workers that stay.
        samples = self.members.samples() if self.members.together else self.members.dealt
        factors = [factor for factor in (self.members.dealt / samples, self._scale()) if factor != 1.0]
        self.store.push(bucket.name, bucket.host_gradients(factors), bucket.priority, rate)
        self.members.sent.add(bucket)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """In an elastic job raises RuntimeError if the members change meanwhile, outside of `KVStore.repeat`. There
        this worker must not enter a view: the round or the epoch that it has begun would not take notice of it."""
        if self._elastic and self._elastic.entry.collecting:
            return self.inner.state_dict()
        try:
            servers = [torch.frombuffer(state, dtype=torch.uint8) for state in self.store.optimizer_states()]
        except ViewChanged:
            if self._elastic and self._elastic.repeating:
                raise
            raise RuntimeError(
                "the members of the job changed while optimizer.state_dict() read the servers' state: use "
                "state.save(path) after the loop over the loader, which reads it again (docs/elastic-scripts.md)"
            ) from None
        return {**self.inner.state_dict(), SERVERS: servers, ORDERS: orders(self.inner, self.gradients.buckets)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        servers = state_dict.get(SERVERS)
        if servers is None and self._elastic and self._elastic.view:
            return self.load_inner(state_dict)  # another worker's state; the servers keep their own
        if servers is None:
            raise UserError(
                f"this state was saved with the optimizer on the workers, but kvstore {self.store.type} now runs it on "
                "the servers: resume with the kvstore (and update_on_kvstore) that it was saved with"
            )
        check_orders(state_dict.get(ORDERS, {}), self.inner, self.gradients.buckets, self.gradients.names)
        self.load_inner({name: item for name, item in state_dict.items() if name not in (SERVERS, ORDERS)})
        self.store.load_optimizer_state_bytes([state.numpy().tobytes() for state in servers])
        self.gradients.settle()
        self._pull()
        self.gradients.settle()


def _factor(kind: KVStoreType, workers: int) -> float:
    """The servers multiply a sum of so many workers' pushes by this."""
    return 1.0 / workers if kind.synchronous else 1.0


def _refusal(optimizer: torch.optim.Optimizer) -> str:
    return f"optimizer {type(optimizer).__name__} makes sense only where each push is a step"
