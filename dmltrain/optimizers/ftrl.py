"""ftrl: follow the regularized leader (McMahan et al. 2013)."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer
from dmltrain.optimizers.own import Group, ParameterState, array, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's ftrl_update; its formula divides by the learning rate, and a rate of 0 changes nothing."""
    z, n, rate = array(torch, state, "z", weight), array(torch, state, "n", weight), group["lr"]
    if not rate:
        return
    before = n.sqrt()
    n.addcmul_(gradient, gradient)
    after = n.sqrt()
    z.add_(gradient).sub_((after - before).mul_(weight).div_(rate))
    new = (z.sign().mul_(group["lamda1"]).sub_(z)).div_(
        (after.add_(group["beta"])).div_(rate).add_(group["weight_decay"])
    )
    weight.copy_(torch.where(z.abs() > group["lamda1"], new, 0.0))


OPTIMIZER = Optimizer(
    "ftrl", own_torch("Ftrl", update, {"lamda1": 0.01, "beta": 1.0}), MXNet("Ftrl", ("lamda1", "beta"))
)
