"""lamb: Adam with a step size by layer (You et al. 2020)."""

from __future__ import annotations

import math
from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer
from dmltrain.optimizers.own import Group, ParameterState, array, count, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's lamb_update_phase1 and 2. An upper or lower bound of 0 means none."""
    beta1, beta2, step = group["beta1"], group["beta2"], count(state)
    mean, variance = array(torch, state, "exp_avg", weight), array(torch, state, "exp_avg_sq", weight)
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    change = (mean / first).div_(variance.sqrt().div_(math.sqrt(second)).add_(group["epsilon"]))
    change.add_(weight, alpha=group["weight_decay"])
    size, length = weight.norm(), change.norm()
    size = size.clamp(group["lower_bound"] or None, group["upper_bound"] or math.inf)
    ratio = torch.where((size == 0) | (length == 0), 1.0, size / length)
    weight.sub_(change.mul_(ratio), alpha=group["lr"])


OPTIMIZER = Optimizer(
    "lamb",
    own_torch(
        "LAMB",
        update,
        {
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-6,
            "lower_bound": 0.0,
            "upper_bound": 0.0,
            "bias_correction": True,
        },
        elementwise=False,
    ),
    MXNet("LAMB", ("beta1", "beta2", "epsilon", "lower_bound", "upper_bound", "bias_correction"), elementwise=False),
)
