"""nag: Nesterov's accelerated gradient."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, momentum
from dmltrain.optimizers.own import Group, ParameterState, array, decayed, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's kernel (NAGMomKernel of src/operator/optimizer_op-inl.h), with its momentum m = -lr * momentum_buffer. It
    writes the weight first, so the decay that enters the momentum is that of the new weight."""
    factor, now = group["momentum"], decayed(weight, gradient, group)
    if not factor:
        weight.sub_(now, alpha=group["lr"])
        return
    kept = array(torch, state, "momentum_buffer", weight).mul_(factor)
    weight.sub_(now.mul_(factor + 1).add_(kept, alpha=factor), alpha=group["lr"])
    kept.add_(gradient).add_(weight, alpha=group["weight_decay"])


OPTIMIZER = Optimizer(
    "nag",
    own_torch("MXNetNAG", update, {"momentum": 0.0}, arguments=momentum, rate_in_momentum=True),
    MXNet("NAG", ("momentum",), momentum),
)
