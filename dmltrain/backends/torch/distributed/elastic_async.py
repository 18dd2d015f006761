"""The optimizer on the servers of an elastic job with dist_async or dist_ssp, where each worker makes steps of its own.

Such a step is no op of the job. If the members change in the middle of one, this worker enters the new view and pushes
the same gradients again. Servers that have them already use them once. So each step of a worker that goes on counts
once.
"""

from __future__ import annotations

import numpy as np

from dmltrain.arrays import Array
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.elastic_on_servers import ElasticOptimizerOnServers
from dmltrain.kvstore import READ
from dmltrain.kvstore.base import ViewChanged


class ElasticAsyncOptimizer(ElasticOptimizerOnServers):
    """See the module. `round` comes before each step."""

    def _begin_round(self) -> None:
        """Gradients are pushed as soon as they are there."""

    def _commit(self) -> Array:
        """Push what has not been pushed, and wait for the weights. Returns the receipt of the samples."""
        while True:
            try:
                pulled = self._exchange()
                break
            except ViewChanged:
                self._begin_again()
                self.store.enter()
        self._take_all(pulled)
        return self._receipt

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        try:
            self._send(bucket)
        except ViewChanged:  # step() pushes it again
            self._begin_again()

    def synchronize(self) -> None:
        """Take the present weights, but for those who join: they get those of this worker's last step."""
        if self.store.view and not self.store.sharing:
            self.store.repeat(self._pull_all)
        else:
            super().synchronize()

    def _pull_all(self) -> None:
        handles = {bucket: self.store.pull(bucket.name, READ, bucket.priority, wait=False) for bucket in self._buckets}
        for bucket, handle in handles.items():
            handle.wait()
            np.copyto(bucket.pulled, handle.values[0])
            bucket.take_weights()
        self.store.refreshed()

    def _gradients(self, bucket: Bucket) -> Array:
        return bucket.host_gradients()
