"""adagrad: Duchi, Hazan and Singer 2011."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch
from dmltrain.optimizers.own import Group, ParameterState, array, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """As MXNet: epsilon is under the root, and weight decay does not enter the sum of squares."""
    total = array(torch, state, "sum", weight).addcmul_(gradient, gradient)
    change = gradient / (total + group["epsilon"]).sqrt_()
    weight.sub_(change.add_(weight, alpha=group["weight_decay"]), alpha=group["lr"])


OPTIMIZER = Optimizer(
    "adagrad",
    own_torch("MXNetAdaGrad", update, {"epsilon": 1e-7}),
    MXNet("AdaGrad", ("eps",), attributes={"eps": "float_stable_eps"}),
    plain=Torch(
        "Adagrad", ("lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"), fused=("cpu",)
    ),
)
