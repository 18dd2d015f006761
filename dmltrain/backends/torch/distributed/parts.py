"""Steps of any optimizer of torch in parts: some parameters first, the others later."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import optim

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.buckets import EARLY
from dmltrain.backends.torch.optimizer import BY_CLASS, class_of
from dmltrain.base.errors import UserError

OF_SCRIPTS = (optim.RAdam, optim.Adadelta, optim.Rprop, optim.ASGD)  # used by scripts only
PER_PARAMETER = (*map(class_of, BY_CLASS), *OF_SCRIPTS)


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for optimizers that call a closure several times in a step, such as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer {type(optimizer).__name__} computes gradients several times in a step, which are sent for one "
            f"step {EARLY}: train without these"
        )


def step_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """A copy of each group's current options, without its parameters. None if the step cannot be made in parts: the
    class is not in PER_PARAMETER (subclasses are not), hooks expect whole steps, there is a gradient scaler, or an
    option is a tensor.
    """
    if type(optimizer) not in PER_PARAMETER or not plain_step.is_possible(optimizer):
        return None
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(isinstance(value, torch.Tensor) for group in options for value in group.values()):
        return None
    return options


def changes_gradients(options: dict[str, Any]) -> bool:
    """Whether a step with these options writes to gradients. torch's _multi_tensor_sgd does: it adds the momentum to
    them in place."""
    return bool(options.get("nesterov") and options.get("foreach"))


def step_parameters(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> None:
    """Step these parameters of one group. `options`: the group's options when step() was called."""
    whole = optimizer.param_groups
    optimizer.param_groups = [{**options, "params": parameters}]
    try:
        plain_step.step(optimizer)
    finally:
        optimizer.param_groups = whole
