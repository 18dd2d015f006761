"""An optimizer whose weights are keys of a kvstore, bucket by bucket. All workers start from worker 0's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    if not tensors or store.num_workers == 1:
        return
    parts = [_numbers(each) for each in tensors]
    flat = torch.cat(parts)
    own = flat if store.rank == 0 else torch.zeros_like(flat)  # not flat * 0, which makes nan of infinity
    shared = torch.from_numpy(store.all_reduce(store.new_name("first buffers"), own.numpy()))
    with torch.no_grad():
        for tensor, part in zip(tensors, shared.split([len(each) for each in parts]), strict=True):
            if not tensor.is_floating_point():
                part = part.to(torch.uint8).view(tensor.dtype)
            tensor.copy_(part.reshape(tensor.shape))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor has, in float64: its numbers, or the bytes of those that are not floating-point."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return (flat if tensor.is_floating_point() else flat.view(torch.uint8)).double()
