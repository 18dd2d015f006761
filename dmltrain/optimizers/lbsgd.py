"""lbsgd: MXNet's SGD for large batches. With --warmup-strategy lars each layer has a rate of its own.

The other warm-ups belong to the learning rate's schedule here, and without one lbsgd is sgd. MXNet computes its norms
with gradients that are sums over a worker's batch; here they are means over the step's samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmltrain.optimizers.optimizer import Chosen, MXNet, Number, Optimizer
from dmltrain.optimizers.own import Group, ParameterState, array, decayed, own_torch

LEAST, MOST = 0.01, 100.0  # of a layer's ratio


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's LBSGD with batch_scale 1; its momentum m = -lr * momentum_buffer contains a layer's ratio."""
    now = decayed(weight, gradient, group)
    if group["layerwise"]:
        size, length = weight.square().sum(), gradient.square().sum()
        ratio = (size / (length + group["weight_decay"] * size + 1e-18)).sqrt_().clamp_(LEAST, MOST)
        now = now.mul_(ratio)
    if group["momentum"]:
        now = array(torch, state, "momentum_buffer", weight).mul_(group["momentum"]).add_(now)
    weight.sub_(now, alpha=group["lr"])


def mxnet_class(mx: Any) -> type[Any]:
    """MXNet's, with a number in place of the name of a strategy: specs have no other texts than names."""

    class LBSGD(mx.optimizer.LBSGD):  # type: ignore[misc]  # MXNet has no types
        def __init__(self, layerwise: Number = False, **words: Any) -> None:
            super().__init__(warmup_strategy="lars" if layerwise else "linear", warmup_epochs=0, **words)

        @property
        def layerwise(self) -> bool:
            return bool(self.warmup_strategy == "lars")

    return LBSGD


def arguments(chosen: Chosen) -> Mapping[str, Number]:
    return {"momentum": chosen.mom, "layerwise": chosen.warmup_strategy == "lars"}


OPTIMIZER = Optimizer(
    "lbsgd",
    own_torch(
        "LBSGD",
        update,
        {"momentum": 0.0, "layerwise": False},
        arguments=arguments,
        elementwise=False,
        rate_in_momentum=True,
    ),
    MXNet("LBSGD", ("momentum", "layerwise"), arguments, elementwise=False, own=mxnet_class),
)
