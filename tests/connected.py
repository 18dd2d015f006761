"""`connect`, as `dmltrain.distribute` and the trainer call it, on a store of the test's own."""

from dataclasses import astuple
from typing import Any

import torch

from dmltrain.backends.torch.distributed import DistributedOptimizer, connect
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.kvstore.local_steps import LocalSteps


def connected(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    store: KVStore,
    averaging: LocalSteps | None = None,
    **choices: Any,
) -> DistributedOptimizer:
    """`choices`: fields of ExchangeChoices; `averaging` stands for the three of local steps."""
    steps, rate, momentum = astuple(averaging) if averaging else (None, None, None)
    asked = ExchangeChoices(store.type, local_steps=steps, outer_lr=rate, outer_momentum=momentum, **choices)
    return connect(model, optimizer, store, asked)
