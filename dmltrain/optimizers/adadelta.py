"""adadelta: Zeiler 2012. As in MXNet it has no learning rate: --lr and its multipliers have no effect, unless they are
0, which keeps an array as it is."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer
from dmltrain.optimizers.own import Group, ParameterState, array, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """As MXNet: weight decay does not enter the means, and is not multiplied by a rate."""
    if not group["lr"]:
        return
    rho, epsilon = group["rho"], group["epsilon"]
    squares, changes = array(torch, state, "square_avg", weight), array(torch, state, "acc_delta", weight)
    squares.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
    change = (changes + epsilon).sqrt_().div_((squares + epsilon).sqrt_()).mul_(gradient)
    changes.mul_(rho).addcmul_(change, change, value=1 - rho)
    weight.sub_(change.add_(weight, alpha=group["weight_decay"]))


OPTIMIZER = Optimizer(
    "adadelta", own_torch("MXNetAdaDelta", update, {"rho": 0.9, "epsilon": 1e-5}), MXNet("AdaDelta", ("rho", "epsilon"))
)
