"""adamw: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

from __future__ import annotations

import math
from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch


def mxnet_class(mx: Any) -> type[Any]:
    """torch's AdamW with MXNet's operator: w -= lr * (correction * m / (sqrt(v) + epsilon') + wd * w). torch adds
    epsilon to a root of v with bias correction, so epsilon' = epsilon * sqrt(1 - beta2^t)."""

    class AdamW(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
        def __init__(
            self,
            learning_rate: float = 0.001,
            beta1: float = 0.9,
            beta2: float = 0.999,
            epsilon: float = 1e-8,
            **words: Any,
        ) -> None:
            super().__init__(learning_rate=learning_rate, **words)
            self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

        def create_state(self, index: int, weight: Any) -> tuple[Any, Any]:
            return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)  # mean, variance

        def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, Any]) -> None:
            self._update_count(index)
            count, clip = self._index_update_count[index], self.clip_gradient
            root = math.sqrt(1.0 - self.beta2**count)
            mx.nd.contrib.adamw_update(
                weight,
                grad,
                *state,
                self.rescale_grad,
                lr=root / (1.0 - self.beta1**count),
                eta=self._get_lr(index),
                wd=self._get_wd(index),
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon * root,
                out=weight,
                **({"clip_gradient": clip} if clip else {}),
            )

    return AdamW


OPTIMIZER = Optimizer(
    "adamw",
    Torch("AdamW", ("betas", "eps", "weight_decay", "amsgrad", "maximize"), fused=("cpu", "gpu")),
    MXNet("AdamW", ("beta1", "beta2", "epsilon"), own=mxnet_class),
)
