"""nadam: Adam with Nesterov's momentum (Dozat 2016)."""

from __future__ import annotations

from typing import Any

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch


def mxnet_class(mx: Any) -> type[Any]:
    """MXNet's, with a schedule of momentum for each key. MXNet has one for all keys, so that its steps depend on the
    number of keys."""

    class Nadam(mx.optimizer.Nadam):  # type: ignore[misc]  # MXNet has no types
        def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, Any]) -> None:
            done = self._index_update_count.get(index, self.begin_num_update)
            known, product = self._schedules.get(index, (0, 1.0))
            for step in range(known + 1, done + 1):  # more than none after a state was loaded
                product *= self.beta1 * (1.0 - 0.5 * 0.96 ** (step * self.schedule_decay))
            self.m_schedule = product
            super().update(index, weight, grad, state)
            self._schedules[index] = (done + 1, self.m_schedule)

        def __init__(self, **words: Any) -> None:
            super().__init__(**words)
            self._schedules: dict[int, tuple[int, float]] = {}  # key -> steps, the product of their momentums

    return Nadam


OPTIMIZER = Optimizer(
    "nadam",
    Torch("NAdam", ("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")),
    MXNet("Nadam", ("beta1", "beta2", "epsilon", "schedule_decay"), own=mxnet_class),
)
