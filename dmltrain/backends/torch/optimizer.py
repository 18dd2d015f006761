"""The optimizers in PyTorch, as the table of optimizers describes them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dmltrain import optimizers
from dmltrain.backends.backend import Settings

DECAYED = ("weight", "gamma")  # weight decay applies to names with these endings, as MXNet's Optimizer.set_wd_mult
# Class name in lower case -> row. Rows of the same class (nag is an option of SGD) differ in `arguments` only.
BY_CLASS = {row.torch.name.lower(): row.torch for row in optimizers.TABLE if row.torch}


@functools.cache
def class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer class `name`, in lower case."""
    row = BY_CLASS[name]
    found: Callable[..., torch.optim.Optimizer] = row.own(torch) if row.own else getattr(torch.optim, row.name)
    return found


def make_optimizer(module: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """settings.optimizer for the module's parameters, fused if torch supports it; biases and betas do not decay."""
    row = optimizers.BY_NAME[settings.optimizer].torch
    assert row, "--optimizer offers only what PyTorch has"
    named = list(module.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith(DECAYED)], "weight_decay": settings.wd},
        {"params": [p for name, p in named if not name.endswith(DECAYED)], "weight_decay": 0.0},
    ]
    fused = {"fused": True} if named[0][1].device.type in row.fused else {}
    kind = class_of(row.name.lower())
    return kind([group for group in groups if group["params"]], lr=settings.lr, **fused, **row.arguments(settings.mom))


def fused_on(device: torch.device) -> tuple[str, ...]:
    """The values of --optimizer that have a fused kernel on the device."""
    return tuple(row.name for row in optimizers.TABLE if row.torch and device.type in row.torch.fused)
