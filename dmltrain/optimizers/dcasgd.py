"""dcasgd: asynchronous SGD that compensates for the delay of gradients (Zheng et al. 2017).

PyTorch's servers know for each worker the weight that it has pulled last, as the paper wants it. MXNet's have one
previous weight for all: that before the last step.
"""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, momentum
from dmltrain.optimizers.own import Group, ParameterState, array, decayed, own_torch


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's formula; state["pulled"] is the worker's weight, if it differs from this one."""
    now, pulled = decayed(weight, gradient, group), state.pop("pulled", None)
    if pulled is not None:
        now.addcmul_(gradient.square(), weight - pulled, value=group["lamda"])
    if group["momentum"]:
        now = array(torch, state, "momentum_buffer", weight).mul_(group["momentum"]).add_(now)
    weight.sub_(now, alpha=group["lr"])


def mxnet_class(mx: Any) -> type[Any]:
    """MXNet's, which fails with a momentum: it takes the truth value of an array."""

    class DCASGD(mx.optimizer.DCASGD):  # type: ignore[misc]  # MXNet has no types
        def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, Any]) -> None:
            self._update_count(index)
            rate, decay, (kept, previous) = self._get_lr(index), self._get_wd(index), state
            grad = grad * self.rescale_grad
            if self.clip_gradient is not None:
                grad = mx.nd.clip(grad, -self.clip_gradient, self.clip_gradient)
            change = -rate * (grad + decay * weight + self.lamda * grad * grad * (weight - previous))
            if kept is not None:
                kept[:] = self.momentum * kept + change
                change = kept
            previous[:] = weight
            weight[:] += change

    return DCASGD


OPTIMIZER = Optimizer(
    "dcasgd",
    own_torch(
        "DCASGD", update, {"momentum": 0.0, "lamda": 0.04}, arguments=momentum, rate_in_momentum=True, needs_pulled=True
    ),
    MXNet("DCASGD", ("momentum", "lamda"), momentum, own=mxnet_class),
    asynchronous=True,
)
