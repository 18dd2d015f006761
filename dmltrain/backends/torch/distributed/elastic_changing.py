"""The optimizer on the servers of an elastic job, whose members may change in the middle of a step.

Where all workers step together (dist_sync), weights are pulled into separate memory, and copied to the model when the
store has recognised the round. If the members change before that, the servers undo their steps of the round, and the
remaining workers push the same gradients again.

The step uses the mean over the samples of the workers that stay in the job. Servers add gradients and know nothing of
samples, so the workers agree on the number first: each sends a checksum of its samples when the round begins. When all
checksums have come, each worker pushes its gradients, multiplied by (samples dealt / samples in the checksums). Usually
the two are equal, and the checksums arrive before the first gradient is ready.

With dist_async and dist_ssp each worker makes its own steps, which are no ops of the job. If the members change in the
middle of such a step, this worker enters the new view and pushes the same gradients again. A server that has them
already does not use them twice. So each step of a worker that stays in the job counts once. The kvstore may change
between these types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.elastic import RECEIPT, check_round
from dmltrain.backends.torch.distributed.on_servers import OptimizerOnServers
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import READ, Handle, ViewChanged
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.kvstore.types import KVStoreType
from dmltrain.kvstore.worker.elastic_store import ElasticKVStore


class ElasticChangingOptimizer(OptimizerOnServers):
    """See the module. `round` comes before each step. With `choices.average` servers divide by the number of workers at
    the job's start, which is what `weigh` expects."""

    store: ElasticKVStore

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: ElasticKVStore,
        choices: ExchangeChoices,
    ) -> None:
        self._workers = store.num_workers  # at the job's start
        super().__init__(model, optimizer, store, replace(choices, defer=False))
        self._checksums = store.new_name("receipts")
        self._dealt, self._checksum = 0, np.zeros(RECEIPT)
        self._after_step: Callable[[Array], None] | None = None
        self._checksum_sum: Handle | None = None  # of the checksums, in the present view
        self._sent: set[Bucket] = set()  # in the present view
        self._sent_in = store.view  # that view
        store.take_weights = self.synchronize
        store.keep_snapshots(lambda: {bucket.name: bucket.host_weights() for bucket in self._buckets})

    def _factor_of(self, kind: KVStoreType) -> float:
        return 1.0 / self._workers if self._average and kind.synchronous else 1.0

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        self._dealt, self._checksum, self._after_step = dealt, np.array(checksum, np.float64), then
        self._begin_round()

    @property
    def _steps_together(self) -> bool:
        """Whether all workers make each step together."""
        return self.store.kvstore_type.synchronous

    def _begin_round(self) -> None:
        """Workers that step alone agree on nothing: each pushes its gradients as soon as they are complete."""
        if not self._steps_together:
            return
        try:
            self._sum_checksums()
        except ViewChanged:  # step() asks again
            self._begin_again()

    def forget_round(self) -> None:
        self._begin_again()
        self._dealt = 0
        for bucket in self._buckets:
            bucket.begin()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises what `KVStore.enter` raises, if this worker is no longer a member of the job."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_settings()
        check_round(self._dealt > 0)
        self.push_gradients()
        self.committed = self._commit()
        self.forget_round()
        if then := self._after_step:
            then(self.committed)
        return loss

    def synchronize(self) -> None:
        """Take the servers' present weights, but not in a view: there the weights of all workers that step together
        always include the last step. Of two moments in which workers that step alone keep theirs: while this one gives
        its state to a newcomer, they are those of its own last step; between two epochs those of the epoch's end, where
        a pull could make it enter a view, and it would not know that others have begun the next epoch."""
        if not self.store.view:
            super().synchronize()
        elif not (self._steps_together or self.store.sharing or self.store.between_epochs()):
            self.store.repeat(self._pull_all)

    def _pull_all(self) -> None:
        handles = {bucket: self.store.pull(bucket.name, READ, bucket.priority, wait=False) for bucket in self._buckets}
        for bucket, handle in handles.items():
            handle.wait()
            np.copyto(bucket.pulled, handle.values[0])
            bucket.take_weights()
        self.store.refreshed()

    def state_dict(self) -> dict[str, Any]:
        """Raises RuntimeError if the members change meanwhile, outside of `KVStore.repeat`. There this worker must not
        enter a view: the round or the epoch that it has begun would not take notice of it."""
        if self.store.sharing:
            return self.inner.state_dict()
        try:
            return super().state_dict()
        except ViewChanged:
            if self.store.repeating:
                raise
            raise RuntimeError(
                "the members of the job changed while optimizer.state_dict() read the servers' state: use "
                "state.save(path) after the loop over the loader, which reads it again (docs/elastic-scripts.md)"
            ) from None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.store.view and "servers" not in state_dict:  # another worker's state; the servers keep their own
            self._load_inner(state_dict)
        else:
            super().load_state_dict(state_dict)

    def _commit(self) -> Array:
        """Push the buckets that are not pushed yet, and wait until the round is recognised. Returns the sum of its
        checksums: (3,); zeros if other workers have made the step and this one has its result already. A worker that
        steps alone waits for the weights, and returns the checksum of its step."""
        if not self._steps_together:
            return self._commit_own()
        while True:
            try:
                checksums = self._sum_checksums()
                checksums.wait()
                total = np.array(checksums.values[0])
                pulled = self._exchange() if total[0] else {}
                self.store.complete()
                break
            except ViewChanged:
                self._begin_again()
                if self.store.enter():
                    return np.zeros(RECEIPT)
        if pulled:
            self._take_all(pulled)
        return total

    def _commit_own(self) -> Array:
        while True:
            try:
                pulled = self._exchange()
                break
            except ViewChanged:
                self._begin_again()
                self.store.enter()
        self._take_all(pulled)
        return self._checksum

    def _take_all(self, pulled: dict[Bucket, Handle]) -> None:
        """The step is made: copy the new weights to the model."""
        for bucket, handle in pulled.items():
            np.copyto(bucket.pulled, handle.values[0])
            bucket.take_weights()
        self.store.stepped()

    def _exchange(self) -> dict[Bucket, Handle]:
        """Push all gradients, and wait for the weights after the step."""
        for bucket in reversed(self._buckets):
            self._send(bucket)
        pulled = {bucket: self.store.pull(bucket.name, READ, bucket.priority, wait=False) for bucket in self._buckets}
        for handle in pulled.values():
            handle.wait()
        return pulled

    def _sum_checksums(self) -> Handle:
        """The sum of the checksums in the present view."""
        self._follow_view()
        if self._checksum_sum is None:
            self._checksum_sum = self.store.sum_in_round(self._checksums, self._checksum)
        return self._checksum_sum

    def _follow_view(self) -> None:
        """Begin again if this worker has entered another view since, which happens while the script saves a
        checkpoint."""
        if self._sent_in is not self.store.view:
            self._begin_again()
            self._sent_in = self.store.view

    def _begin_again(self) -> None:
        self._checksum_sum = None
        self._sent.clear()

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        if not self._steps_together:
            return self._push_own(bucket)
        self._follow_view()
        if self._checksum_sum is not None and self._checksum_sum.done:  # else step() pushes it
            try:
                self._checksum_sum.wait()
                if self._checksum_sum.values[0][0]:
                    self._send(bucket)
            except ViewChanged:
                self._begin_again()

    def _push_own(self, bucket: Bucket) -> None:
        try:
            self._send(bucket)
        except ViewChanged:  # step() pushes it again
            self._begin_again()

    def _send(self, bucket: Bucket) -> None:
        """Push the gradients of a bucket, unless they were pushed in this view."""
        self._follow_view()
        if bucket in self._sent:
            return
        rate = float(self.inner.param_groups[bucket.group]["lr"]) * self.rate_factor
        self.store.push(bucket.name, self._gradients(bucket), bucket.priority, rate)
        self._sent.add(bucket)

    def _gradients(self, bucket: Bucket) -> Array:
        """The gradients to push, scaled so that the step uses the mean over the samples of the workers that stay."""
        gradients = bucket.host_gradients()
        if self._steps_together:
            assert self._checksum_sum is not None
            committed = int(self._checksum_sum.values[0][0])
            if committed != self._dealt:
                gradients = gradients * gradients.dtype.type(self._dealt / committed)
        scale = self._factor_of(self.store.kvstore_type) / self._factor  # the servers' factor is that of the start
        return gradients if scale == 1.0 else gradients * gradients.dtype.type(scale)
