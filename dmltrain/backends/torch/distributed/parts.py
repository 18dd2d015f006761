"""One step of a torch optimizer in parts: some parameters now, others later, with bit-identical results.

This is possible for optimizers that treat parameters independently. Fused kernels stay fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.optimizer import BY_CLASS, class_of

OTHERS = (optim.RAdam, optim.Adadelta, optim.Rprop, optim.ASGD)  # used by scripts only
PER_PARAMETER = (*map(class_of, BY_CLASS), *OTHERS)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """A copy of each group's current options without its parameters; None if the step cannot be made in parts: other
    classes (also subclasses), hooks that expect whole steps, a gradient scaler, or options that are tensors.
    """
    if type(optimizer) not in PER_PARAMETER or not plain_step.is_possible(optimizer):
        return None
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(isinstance(value, torch.Tensor) for group in options for value in group.values()):
        return None
    return options


def changes_gradients(options: dict[str, Any]) -> bool:
    """Whether a step with these options writes to gradients: torch's _multi_tensor_sgd adds the momentum to them."""
    return bool(options.get("nesterov") and options.get("foreach"))


def step(optimizer: torch.optim.Optimizer, options: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
    """Step these parameters of one group with `options`, a copy from the time of the call of step()."""
    whole = optimizer.param_groups
    optimizer.param_groups = [{**options, "params": parameters}]
    try:
        plain_step.step(optimizer)
    finally:
        optimizer.param_groups = whole
