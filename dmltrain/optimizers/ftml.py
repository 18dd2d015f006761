"""ftml: follow the moving leader (Zheng and Kwok 2017)."""

from __future__ import annotations

import math
from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer
from dmltrain.optimizers.own import Group, ParameterState, array, count, decayed, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's FTMLKernel (src/operator/optimizer_op-inl.h); a learning rate of 0 changes nothing."""
    if not group["lr"]:
        return
    beta1, beta2, step, now = group["beta1"], group["beta2"], count(state), decayed(weight, gradient, group)
    d, v, z = (array(torch, state, name, weight) for name in ("d", "v", "z"))
    v.mul_(beta2).addcmul_(now, now, value=1 - beta2)
    scale = (1 - beta1**step) / group["lr"]
    new = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["epsilon"]).mul_(scale)
    z.mul_(beta1).add_(now, alpha=1 - beta1).addcmul_(new - beta1 * d, weight, value=-1.0)
    d.copy_(new)
    weight.copy_(z / new).neg_()


OPTIMIZER = Optimizer(
    "ftml",
    own_torch("FTML", update, {"beta1": 0.6, "beta2": 0.999, "epsilon": 1e-8}),
    MXNet("FTML", ("beta1", "beta2", "epsilon")),
)
