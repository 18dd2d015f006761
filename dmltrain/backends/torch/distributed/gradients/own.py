"""The gradients of one worker, which are sent nowhere: it is alone, or each worker steps alone (dist_local)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dmltrain.backends.torch.distributed import owners
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.base.errors import UserError


class OwnGradients:
    """See the module, and DistributedOptimizer for the methods of the same names. The base of gradients that are sent.
    `buckets`: those of all parameters that are trained, where weights or gradients travel in buckets."""

    def __init__(self, inner: torch.optim.Optimizer, buckets: Sequence[Bucket] | None = None) -> None:
        self.inner = inner
        self.weight = 1.0  # of the next backward
        self.more = False  # whether the gradients of this step are incomplete after the next backward
        self._in_buckets, self.buckets = buckets is not None, list(buckets or ())
        self.hooks: list[RemovableHandle] = []
        self._is_released = False
        owners.claim(self, {parameter for bucket in self.buckets for parameter in bucket.parameters})

    def release(self) -> None:
        """See owners.Owner."""
        self.settle()
        self._is_released = True
        for hook in self.hooks:
            hook.remove()
        owners.disown(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._in_buckets:
            raise UserError("add all parameters to the optimizer before dmltrain.distribute")
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool) -> None:
        self.inner.zero_grad(set_to_none)

    def weigh(self, weight: float, more: bool = False) -> None:
        self.weight, self.more = weight, more

    def rescale(self, factor: float) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and factor != 1.0:
                with torch.no_grad():
                    parameter.grad.mul_(factor)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        yield

    def push(self) -> None:
        """Send gradients that are complete."""

    def reduce(self) -> None:
        """See DistributedOptimizer.reduce_gradients."""
        self.check_complete()
        weight, self.weight = self.weight, 1.0
        self.rescale(weight)

    def begin_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before a whole step of the inner optimizer. Returns the closure for it."""
        self.reduce()
        return closure

    def end_step(self) -> None:
        """After a whole step."""

    def settle(self) -> None:
        """See DistributedOptimizer.settle."""

    def check_complete(self) -> None:
        if self.more:
            raise UserError(
                "step() before the last micro-batch of dmltrain.loader: call it only where loader.step_ends is true"
            )

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]
