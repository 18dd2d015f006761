"""signum: the sign of the momentum (Bernstein et al. 2018)."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, momentum
from dmltrain.optimizers.own import Group, ParameterState, array, decayed, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's signum_update, and without momentum its signsgd_update, in which weight decay does not enter the sign."""
    factor, rate = group["momentum"], group["lr"]
    if factor:
        mean = array(torch, state, "momentum_buffer", weight)
        mean.mul_(factor).add_(decayed(weight, gradient, group), alpha=1 - factor)
        weight.mul_(1 - rate * group["wd_lh"]).sub_(mean.sign(), alpha=rate)
    else:
        weight.mul_(1 - rate * group["weight_decay"]).sub_(gradient.sign(), alpha=rate)


OPTIMIZER = Optimizer(
    "signum",
    own_torch("Signum", update, {"momentum": 0.9, "wd_lh": 0.0}, arguments=momentum),
    MXNet("Signum", ("momentum", "wd_lh"), momentum),
)
