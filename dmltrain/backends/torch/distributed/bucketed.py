"""An optimizer whose weights are keys of a kvstore, bucket by bucket. All workers start from worker 0's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.backends.torch.distributed.layout import make_buckets
from dmltrain.backends.torch.distributed.serial import DistributedOptimizer
from dmltrain.errors import UserError
from dmltrain.kvstore import KVStore


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
        self._buckets = make_buckets(model, optimizer, store.new_name("bucket"), whole, factored)
        self._factored = [bucket for bucket in self._buckets if isinstance(bucket, FactoredBucket)]
        self._declare([bucket for bucket in self._buckets if bucket not in self._factored], whole, mean)
        for each in self._factored:
            each.prepare(store)
        _share_rest(model, self._buckets, store)

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("add all parameters to the optimizer before dmltrain.distribute")


def _share_rest(model: torch.nn.Module, buckets: list[Bucket], store: KVStore) -> None:
    """Copy worker 0's frozen parameters and its buffers (batch-norm statistics, masks, permutations) to all workers."""
    trained = {parameter for bucket in buckets for parameter in bucket.parameters}
    tensors = [each for each in (*model.parameters(), *model.buffers()) if each not in trained]
    if store.num_workers == 1 or store.is_alone:  # who joins later gets all of it with the state of training
        return
    sizes = np.zeros(store.num_workers)
    sizes[store.rank] = sum(each.numel() * each.element_size() for each in tensors)
    sizes = store.all_reduce(store.new_name("size of the rest"), sizes)
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise UserError(
                f"the workers' models differ: worker {rank} has {size:.0f} bytes of buffers and frozen parameters, "
                f"worker 0 has {sizes[0]:.0f}: build the same model on all workers"
            )
    if not sizes[0]:
        return
    own = torch.cat([_bytes(each) for each in tensors])
    store.broadcast(own.numpy(), needed=store.rank != 0)
    if store.rank != 0:
        parts = own.split([each.numel() * each.element_size() for each in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))  # a clone is aligned for its type


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
