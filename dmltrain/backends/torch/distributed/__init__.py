"""A torch optimizer whose steps use all workers' gradients: what `dmltrain.distribute` returns.

Gradients live in flat buckets of about a mebibyte, in forward order (buckets.py), each a key of the kvstore. A
bucket leaves as soon as backward has produced its last gradient. Then either
- the servers only sum: the sum comes back into the same memory, and the worker's own optimizer makes the step, bucket
  by bucket as the sums arrive (on_workers.py; any torch optimizer; dist_sync's default); or
- the servers make the step (on_servers.py; dist_async, dist_ssp, and dist_sync with update_on_kvstore): the
  weights come back into the memory of the model's parameters, asked for after backward and awaited just before the
  next forward.
Deferred, buckets are awaited one by one, each where the next forward first reads it (overlap.py, gates.py).
"""

from __future__ import annotations

import torch

from dmltrain.backends.torch.distributed.on_servers import OptimizerOnServers
from dmltrain.backends.torch.distributed.on_workers import OptimizerOnWorkers
from dmltrain.backends.torch.distributed.serial import DistributedOptimizer
from dmltrain.kvstore import KVStore

__all__ = ["DistributedOptimizer", "distribute"]


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    store: KVStore,
    *,
    average: bool = True,
    overlap: bool = True,
    update_on_kvstore: bool = False,
    defer: bool = False,
) -> DistributedOptimizer:
    """Join `model` and `optimizer` to the other workers of `store`; every worker starts from worker 0's weights.

    average: the mean of the workers' gradients, else their sum (dist_sync). overlap: push during backward; without it
    call `push_gradients`. update_on_kvstore: dist_sync with the optimizer on the servers. Raises UserError for weights
    that are neither float32 nor float64, or an optimizer that servers do not have.

    defer: `step()` returns at once, and the next forward waits for each bucket just before it first reads it. The
    numbers are the same, bit for bit. `model(x)`, `model.state_dict()` and this optimizer's methods see finished
    weights; before weights are read in other ways (`model.parameters()`, a submodule called by itself) call
    `optimizer.settle()`. Under torch.compile, and for optimizers that cannot step in parts (parts.py), all is
    awaited as without it.

    `parameter.grad` is the worker's own gradient after backward(), the sum or mean after `reduce_gradients()`, and
    nothing to rely on after `step()`.
    """
    if not store.is_distributed:
        return DistributedOptimizer(optimizer)
    kind = OptimizerOnServers if store.kvstore_type.steps_on_servers(update_on_kvstore) else OptimizerOnWorkers
    return kind(model, optimizer, store, average, overlap, defer)
