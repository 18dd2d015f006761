"""An optimizer whose weights are keys of a kvstore, bucket by bucket. All workers start from worker 0's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dmltrain.backends.torch.distributed import owners, same
from dmltrain.backends.torch.distributed.base_optimizer import DistributedOptimizer
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.backends.torch.distributed.layout import make_buckets
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore


class BucketedOptimizer(DistributedOptimizer):
    """Base of all optimizers of several workers. `whole`: each parameter is a key of its own, on one server. `mean`:
    see KVStore.init. `factored`: see make_buckets."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        whole: bool = False,
        mean: bool = False,
        factored: Mapping[torch.nn.Parameter, int] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.store = store
        same.check(store, list(model.named_parameters()), list(model.named_buffers()))
        self._buckets = make_buckets(model, optimizer, store.new_name("bucket"), whole, factored)
        self._factored = [bucket for bucket in self._buckets if isinstance(bucket, FactoredBucket)]
        self._declare([bucket for bucket in self._buckets if bucket not in self._factored], whole, mean)
        for bucket in self._factored:
            bucket.prepare(store)
        self._hooks: list[RemovableHandle] = []
        self._is_released = False
        trained = {parameter for bucket in self._buckets for parameter in bucket.parameters}
        same.share(store, [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in trained])
        owners.claim(self, trained)

    def _declare(self, buckets: list[Bucket], whole: bool, mean: bool) -> None:
        """Declare the buckets' keys, and take worker 0's weights."""
        keys = [bucket.name for bucket in buckets]
        self.store.init(keys, [bucket.host_weights() for bucket in buckets], whole=whole, mean=mean)
        for bucket, memory in zip(buckets, self.store.buffers(keys), strict=True):
            bucket.lay_out(memory, self.store.keeps_gradients)
        for bucket in buckets:
            weights = bucket.host_weights()
            self.store.pull(bucket.name, weights)
            bucket.set_weights(torch.from_numpy(weights))

    def release(self) -> None:
        """See owners.Owner."""
        if self._factored:
            raise UserError(
                "a model whose dense layers send factors cannot go through dmltrain.distribute again: leave out factors"
            )
        self.settle()
        self._is_released = True
        for hook in self._hooks:
            hook.remove()
        owners.disown(self)

    def _check_owner(self) -> None:
        if self._is_released:
            raise UserError(owners.REPLACED)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("add all parameters to the optimizer before dmltrain.distribute")
