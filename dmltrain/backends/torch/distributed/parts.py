"""One step of a torch optimizer in parts: some parameters now, others later, the same numbers bit for bit.

True of optimizers that work on each element for itself and keep their state by parameter; fused kernels stay fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim
from torch.optim import optimizer as base

from dmltrain.backends.torch.optimizer import BY_CLASS, class_of

OTHERS = (optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop, optim.ASGD)  # of programs' own
ELEMENTWISE = (*(class_of(name) for name, row in BY_CLASS.items() if row.elementwise), *OTHERS)
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """A copy of each group's options as they are now, without its parameters; None where parts are not the whole: other
    classes (also derived ones), hooks that expect whole steps, a gradient scaler's numbers, options that are tensors.
    """
    if type(optimizer) not in ELEMENTWISE or _watched(optimizer):
        return None
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(isinstance(value, torch.Tensor) for group in options for value in group.values()):
        return None
    return options


def step(optimizer: torch.optim.Optimizer, options: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
    """Step these parameters of one group, with `options` of the time when the step was asked for."""
    whole = optimizer.param_groups
    optimizer.param_groups = [{**options, "params": parameters}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = whole


def _watched(optimizer: torch.optim.Optimizer) -> bool:
    """Somebody expects one call of step() for each step, or prepares it."""
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):  # that one only notes that it ran
        return True
    hooks = [getattr(optimizer, name) for name in HOOKS] + [getattr(base, name, {}) for name in GLOBAL_HOOKS]
    return any(hooks) or any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
