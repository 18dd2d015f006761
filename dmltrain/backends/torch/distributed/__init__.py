"""Torch optimizers of several workers: `dmltrain.distribute` returns one. Most steps use all workers' gradients.

The optimizer that a script sees (optimizer.py) holds an exchange (exchange.py), which says what a step is:
- The servers only sum, and the workers make the step (any torch optimizer; the default of dist_sync). Gradients are the
  mean when backward returns (gradients/means.py). With `step_early` they are sent during backward, and each bucket is
  stepped when its sum arrives (sums.py).
- The servers make the step (on_servers.py; dist_async, dist_ssp, and dist_sync with update_on_kvstore). `step()` sends
  gradients, and returns when the new weights are in the model. With `step_early` weights are pulled into the memory of
  the model's parameters, and the next forward waits for them.
- With dist_local no gradients are sent: each worker steps alone, and from time to time the weights are averaged
  (local_steps.py).

Gradients are in flat buckets of about 1 MiB, in forward order (buckets.py). Each bucket is a key of the kvstore. With
`step_early` a bucket is pushed as soon as backward has produced its last gradient, and nothing waits before step()
(gradients/pushes.py). With `defer` the next forward waits for each bucket just before it first reads it
(parameter_hooks.py). In an elastic job a step changes nothing until all its results are here (members.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dmltrain.backends.torch.distributed.choice import NOTHING_CHOSEN, choose
from dmltrain.backends.torch.distributed.exchange import Exchange
from dmltrain.backends.torch.distributed.gradients.means import MeanGradients
from dmltrain.backends.torch.distributed.gradients.own import OwnGradients
from dmltrain.backends.torch.distributed.local_steps import WeightAverages
from dmltrain.backends.torch.distributed.on_servers import StepsOnServers
from dmltrain.backends.torch.distributed.optimizer import DistributedOptimizer
from dmltrain.backends.torch.distributed.sums import GradientSums
from dmltrain.base import malloc_tuning
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices

__all__ = ["DistributedOptimizer", "connect"]


def connect(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, choices: ExchangeChoices
) -> DistributedOptimizer:
    """Connect `model` and `optimizer` to the other workers of `store`; every worker starts from worker 0's weights.
    `choices.update_on_kvstore` is that of the job. Raises UserError for models that differ between workers, weights
    that cannot be sent, or an optimizer that servers do not have."""
    malloc_tuning.keep_freed_memory()
    while isinstance(optimizer, DistributedOptimizer):
        optimizer = optimizer.inner
    return DistributedOptimizer(_exchange(model, optimizer, store, choices))


def _exchange(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, choices: ExchangeChoices
) -> Exchange:
    if not store.is_distributed:
        return Exchange(OwnGradients(optimizer))
    kind, factors = store.kvstore_type, choices.factors
    if store.elastic:
        rules.check_elastic(choices)
    if choices.broadcast_buffers and (kind.local_steps or not kind.synchronous):
        raise UserError(
            f"broadcast_buffers needs workers that make their steps together: dist_sync (this is {store.type}); leave "
            "it out"
        )
    if kind.local_steps:
        if factors:
            raise UserError(f"factors stand for gradients, and kvstore {store.type} sends none: use dist_sync")
        return WeightAverages(model, optimizer, store, choices.averaging(kind) or kind.local_steps)
    on_servers = kind.steps_on_servers(bool(choices.update_on_kvstore))
    early = choices.step_early or choices.defer or bool(factors) or (store.elastic and on_servers)
    choices = replace(choices, step_early=early)
    _check_factors(store, choices, on_servers)
    if on_servers:
        return StepsOnServers(model, optimizer, store, choices)
    chosen = choose(model, optimizer, store, factors, choices.factored) if factors else NOTHING_CHOSEN
    if early or store.elastic:
        return GradientSums(model, optimizer, store, choices, chosen)
    return Exchange(MeanGradients(model, optimizer, store, choices), store)


def _check_factors(store: KVStore, choices: ExchangeChoices, on_servers: bool) -> None:
    """Raise UserError for choices that factors exclude, with this store."""
    if choices.factors and not choices.overlap:
        raise UserError("factors are sent during backward, which overlap=False excludes: leave one of them out")
    if choices.factors and on_servers:
        raise UserError(
            f"factors need the optimizer on the workers, and kvstore {store.type} runs it on the servers here: use "
            "dist_sync without update_on_kvstore, or no factors"
        )
