"""lars: SGD whose rate for a layer follows the norms of its weight and gradient (You, Gitman and Ginsburg 2017).

As in MXNet, biases, gammas and betas have the plain rate, and only weights decay. --mom is its momentum; MXNet's fit.py
passes none. The momentum does not contain the learning rate, which MXNet reaches by a correction (momentum_correction)
that its class applies to the first keys after a change of the rate only; so there is a class of our own for MXNet, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Number, Optimizer, momentum
from dmltrain.optimizers.own import Group, ParameterState, array, decayed, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """momentum_buffer = momentum * momentum_buffer + ratio * (gradient + wd * weight)"""
    now = decayed(weight, gradient, group)
    if group["layerwise"]:
        size, length = weight.norm(), gradient.norm()
        ratio = group["eta"] * size / (length + group["weight_decay"] * size + group["eps"])
        now = now.mul_(torch.where((size > 0) & (length > 0), ratio, 1.0))
    if group["momentum"]:
        now = array(torch, state, "momentum_buffer", weight).mul_(group["momentum"]).add_(now)
    weight.sub_(now, alpha=group["lr"])


def mxnet_class(mx: Any) -> type[Any]:
    """The same in MXNet."""

    class LARS(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
        def __init__(self, momentum: float = 0.0, eta: float = 0.001, eps: float = 0.0, **words: Any) -> None:
            super().__init__(**words)
            self.momentum, self.eta, self.eps = momentum, eta, eps
            self.layerwise_keys: dict[int, bool] = {}

        def create_state(self, index: int, weight: Any) -> Any:
            return mx.nd.zeros_like(weight) if self.momentum else None

        def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
            self._update_count(index)
            rate, decay = self._get_lr(index), self._get_wd(index)
            grad = grad * self.rescale_grad
            now = (mx.nd.clip(grad, -self.clip_gradient, self.clip_gradient) if self.clip_gradient else grad) + (
                decay * weight
            )
            if self.layerwise_keys.get(index, True):
                now = mx.nd.broadcast_mul(now.reshape(-1), self._ratio(weight, grad, decay)).reshape(weight.shape)
            if state is not None:
                state[:] = self.momentum * state + now
                now = state
            weight[:] -= rate * now

        def _ratio(self, weight: Any, grad: Any, decay: float) -> Any:
            size, length = mx.nd.norm(weight), mx.nd.norm(grad)
            ratio = self.eta * size / (length + decay * size + self.eps)
            return mx.nd.where((size > 0) * (length > 0), ratio, mx.nd.ones_like(ratio))

    return LARS


def of_kind(kind: str) -> Mapping[str, Number]:
    return {} if kind == "weight" else {"layerwise": False, "weight_decay": 0.0}


def of_key(kind: str) -> Mapping[str, Number]:
    return {} if kind == "weight" else {"layerwise": False, "wd_mult": 0.0}


OPTIMIZER = Optimizer(
    "lars",
    own_torch(
        "LARS",
        update,
        {"momentum": 0.0, "eta": 0.001, "eps": 0.0, "layerwise": True},
        arguments=momentum,
        of_kind=of_kind,
        elementwise=False,
    ),
    MXNet("LARS", ("momentum", "eta", "eps"), momentum, of_kind=of_key, elementwise=False, own=mxnet_class),
)
