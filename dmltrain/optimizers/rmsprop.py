"""rmsprop: Tieleman and Hinton 2012."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch
from dmltrain.optimizers.own import Group, ParameterState, array, decayed, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """As MXNet: epsilon is under the root."""
    now, share = decayed(weight, gradient, group), group["gamma1"]
    mean = array(torch, state, "square_avg", weight).mul_(share).addcmul_(now, now, value=1 - share)
    weight.addcdiv_(now, (mean + group["epsilon"]).sqrt_(), value=-group["lr"])


OPTIMIZER = Optimizer(
    "rmsprop",
    own_torch("MXNetRMSProp", update, {"gamma1": 0.9, "epsilon": 1e-8}),
    MXNet("RMSProp", ("gamma1", "gamma2", "epsilon", "centered", "clip_weights")),
    plain=Torch("RMSprop", ("alpha", "eps", "weight_decay", "momentum", "centered", "maximize")),
)
