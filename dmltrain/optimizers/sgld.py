"""sgld: stochastic gradient Langevin dynamics (Welling and Teh 2011): half of SGD's step, and noise of variance lr.

The noise depends on --seed, the array's number and the step only: it is the same on every worker, for any number of
servers, and after a resume. (Workers draw it in the order of the array, PyTorch's servers in that of its memory.)
MXNet's class takes it from the generator of each device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dmltrain.optimizers.optimizer import Chosen, MXNet, Number, Optimizer
from dmltrain.optimizers.own import Group, ParameterState, count, decayed, own_torch


def noise(seed: float, number: int, step: int, size: int) -> Any:
    """Standard normal numbers (size,) float32 for one step of one array."""
    import numpy as np

    return np.random.Generator(np.random.Philox([int(seed), number, step])).standard_normal(size, np.float32)


def update(torch: Any, weight: Any, gradient: Any, state: ParameterState, group: Group) -> None:
    """MXNet's formula."""
    drawn = torch.from_numpy(noise(group["seed"], int(state["number"]), count(state), weight.numel()))
    weight.sub_(decayed(weight, gradient, group), alpha=group["lr"] / 2)
    weight.add_(drawn.reshape(weight.shape).to(weight), alpha=math.sqrt(group["lr"]))


def mxnet_class(mx: Any) -> type[Any]:
    """MXNet's, with this noise."""

    class SGLD(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
        def __init__(self, seed: Number = 0, **words: Any) -> None:
            super().__init__(**words)
            self.seed = seed

        def create_state(self, index: int, weight: Any) -> None:
            return None

        def update(self, index: int, weight: Any, grad: Any, state: None) -> None:
            self._update_count(index)
            rate, decay = self._get_lr(index), self._get_wd(index)
            grad = grad * self.rescale_grad
            if self.clip_gradient is not None:
                grad = mx.nd.clip(grad, -self.clip_gradient, self.clip_gradient)
            drawn = noise(self.seed, index, self._index_update_count[index], weight.size).reshape(weight.shape)
            weight[:] -= rate / 2 * (grad + decay * weight)
            weight[:] += math.sqrt(rate) * mx.nd.array(drawn, weight.context, dtype=weight.dtype)

    return SGLD


def arguments(chosen: Chosen) -> Mapping[str, Number]:
    return {"seed": chosen.seed}


OPTIMIZER = Optimizer(
    "sgld",
    own_torch("SGLD", update, {"seed": 0}, arguments=arguments, elementwise=False, numbered=True),
    MXNet("SGLD", ("seed",), arguments, elementwise=False, own=mxnet_class),
)
