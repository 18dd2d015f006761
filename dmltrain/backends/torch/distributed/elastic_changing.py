"""The optimizer on the servers of an elastic job whose kvstore may change between dist_sync and dist_async or dist_ssp.

With dist_async and dist_ssp each worker makes its own steps, which are no ops of the job. If the members change in the
middle of such a step, this worker enters the new view and pushes the same gradients again. A server that has them
already does not use them twice. So each step of a worker that stays in the job counts once.
"""

from __future__ import annotations

import numpy as np

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.elastic_on_servers import ElasticOptimizerOnServers
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import READ, ViewChanged


class ElasticChangingOptimizer(ElasticOptimizerOnServers):
    """See the module. `round` comes before each step."""

    @property
    def _steps_together(self) -> bool:
        """Whether all workers make each step together."""
        return self.store.kvstore_type.synchronous

    def _begin_round(self) -> None:
        """Workers that step alone agree on nothing: each pushes its gradients as soon as they are complete."""
        if self._steps_together:
            super()._begin_round()

    def _commit(self) -> Array:
        """Push the buckets that are not pushed yet, and wait for the weights. Returns the checksum of the step."""
        return super()._commit() if self._steps_together else self._commit_own()

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

    def _push(self, bucket: Bucket) -> None:
        if self._steps_together:
            return super()._push(bucket)
        bucket.pushed = True
        try:
            self._send(bucket)
        except ViewChanged:  # step() pushes it again
            self._begin_again()

    def synchronize(self) -> None:
        """Take the servers' present weights, with two exceptions. While this worker gives its state to a newcomer, it
        keeps the weights of its own last step. Between two epochs it keeps those of the epoch's end: a pull there could
        make it enter a view, and it would not know that others have begun the next epoch."""
        if not self.store.view or self._steps_together:
            super().synchronize()
        elif not (self.store.sharing or self.store.between_epochs()):
            self.store.repeat(self._pull_all)

    def _pull_all(self) -> None:
        handles = {bucket: self.store.pull(bucket.name, READ, bucket.priority, wait=False) for bucket in self._buckets}
        for bucket, handle in handles.items():
            handle.wait()
            np.copyto(bucket.pulled, handle.values[0])
            bucket.take_weights()
        self.store.refreshed()

    def _gradients(self, bucket: Bucket) -> Array:
        gradients = super()._gradients(bucket) if self._steps_together else bucket.host_gradients()
        scale = self._factor_of(self.store.kvstore_type) / self._factor  # the servers' factor is that of the start
        return gradients if scale == 1.0 else gradients * gradients.dtype.type(scale)
