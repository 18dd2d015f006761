"""lion: the sign of an interpolated momentum (Chen et al. 2023)."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import Optimizer
from dmltrain.optimizers.own import Group, ParameterState, array, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """The paper's program 1; weight decay is decoupled."""
    mean = array(torch, state, "exp_avg", weight)
    change = (mean * group["beta1"]).add_(gradient, alpha=1 - group["beta1"]).sign_()
    weight.sub_(change.add_(weight, alpha=group["weight_decay"]), alpha=group["lr"])
    mean.mul_(group["beta2"]).add_(gradient, alpha=1 - group["beta2"])


OPTIMIZER = Optimizer("lion", own_torch("Lion", update, {"beta1": 0.9, "beta2": 0.99}))
