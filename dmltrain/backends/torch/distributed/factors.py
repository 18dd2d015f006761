"""Sufficient factors: the gradient of a dense layer, sent as the two matrices whose product it is.

A dense layer's weights (M, N) have the gradient D^T X. The rows of D (K, M) are the gradients of the layer's outputs,
those of X (K, N) its inputs, one for each of a worker's K samples. While K is small, both together have far fewer
elements than the gradient. So each worker sends its D and X to all others, and computes the sum of all gradients
itself: one product over the samples of all workers, in the order of their ranks. (Xie et al. 2015, "Distributed Machine
Learning via Sufficient Factor Broadcasting", arXiv:1511.08486, section 3; Zhang et al. 2015, "Poseidon",
arXiv:1512.06216, section 4.2.)

The layers are found where torch applies them: `functional.linear` with a weight of a FactoredBucket goes through
`FactoredBucket.linear`, whose backward keeps D and X and computes no gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dmltrain.arrays import Array
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.errors import UserError
from dmltrain.kvstore import Handle, KVStore


class FactoredBucket(Bucket):
    """The weight of one dense layer, whose gradient is sent as factors. `rows`: samples of a worker's step, at most."""

    def __init__(self, name: str, group: int, priority: int, weight: torch.nn.Parameter, rows: int) -> None:
        super().__init__(name, group, priority, [weight])
        self.weight, self.rows = weight, rows
        outputs, inputs = weight.shape
        self.keys = [f"{name} outputs", f"{name} inputs"]
        self.sizes = [rows * outputs, rows * inputs]
        self._sent = [np.zeros((rows, width), np.float32) for width in (outputs, inputs)]
        self._filled = 0  # rows of them
        self._open = 0  # forwards whose backward has not come
        self._when_ready: Callable[[Bucket], None] = lambda bucket: None

    def lay_out(self, memory: Array) -> None:
        raise NotImplementedError("gradients are computed here, not received")

    def prepare(self, store: KVStore) -> None:
        """Declare the factors, take worker 0's weights, and make memory for the gradient."""
        store.init_gathered(self.keys, self.sizes)
        weights = self.host_weights()
        store.broadcast(weights.view(np.uint8), needed=store.rank != 0)
        self.set_weights(weights)
        self.gradients = torch.empty(self.weight.numel(), dtype=self.weight.dtype, device=self.device)
        self._views = self._cut(self.gradients)

    @property
    def ready(self) -> bool:
        return self._open == 0 and self._filled > 0

    @property
    def has_gradients(self) -> bool:
        return self.weight.grad is None or self.weight.grad is self._views[0]

    def begin(self) -> None:
        super().begin()
        self._filled = self._open = 0

    def accumulate(self) -> None:
        """The rows of the next backward are added to those of this one."""

    def watch(self, when_ready: Callable[[Bucket], None]) -> None:
        self._when_ready = when_ready
        self.weight.register_post_accumulate_grad_hook(self._other_gradient)

    def _other_gradient(self, weight: torch.Tensor) -> None:
        """A gradient that did not come through `linear`; zeros add nothing."""
        if weight.grad is not None and bool(weight.grad.any()):
            raise UserError(
                f"the weight of {tuple(weight.shape)} whose gradient is sent as factors is also used outside of its "
                "dense layer (or in a torch.compile), which factors do not cover: train without factors"
            )
        weight.grad = None

    def complete(self) -> None:
        self._open = 0

    # -- forward and backward -------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """functional.linear, with the factors of the weight's gradient kept in backward."""
        if not torch.is_grad_enabled():
            return functional.linear(x, weight, bias)
        self._open += 1
        found: torch.Tensor = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return found

    def take(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Keep the factors of one backward: gradients of outputs (..., M) and inputs (..., N)."""
        parts = [each.detach().reshape(-1, each.shape[-1]) for each in (grad, x)]
        count = len(parts[0])
        self._open -= 1
        if any(part.dtype != torch.float32 for part in parts):
            raise UserError(
                f"factors must be float32, these are {parts[0].dtype}: train without factors, or in float32"
            )
        if not self.pushed and self._filled + count > self.rows:
            raise UserError(
                f"a step has more than the {self.rows} samples whose factors were declared: give `factors` the largest "
                "number of samples (times positions) of a worker's step"
            )
        if not self.pushed:
            for kept, part in zip(self._sent, parts, strict=True):
                kept[self._filled : self._filled + count] = part.cpu().numpy()
            self._filled += count
        if self._open <= 0:
            self._when_ready(self)

    # -- all workers ----------------------------------------------------------------------------------------------

    def send(self, store: KVStore) -> Handle:
        """Send the factors; the handle's values are those of all workers."""
        for kept in self._sent:
            kept[self._filled :] = 0.0  # a row of zeros adds nothing
        return store.gather(self.keys, [kept.reshape(-1) for kept in self._sent], self.priority)

    def factor_to_mean(self, store: KVStore) -> float:
        return 1.0 / store.num_workers

    def check_unchanged(self) -> None:
        """Factors are copied before they are sent."""

    def take_result(self, handle: Handle, factor: float) -> None:
        """Set the weight's gradient to the sum over all workers times `factor`."""
        self._multiply(handle, factor)
        self.weight.grad = self._views[0]

    def result_in_place(self, handle: Handle, factor: float) -> Any:
        self._multiply(handle, factor)
        return self._with_gradients(self._views)

    def _multiply(self, handle: Handle, factor: float) -> None:
        outputs, inputs = (
            torch.from_numpy(values.reshape(-1, width)).to(self.device)
            for values, width in zip(handle.values, self.weight.shape, strict=True)
        )
        torch.mm((outputs * factor if factor != 1.0 else outputs).t(), inputs, out=self._views[0])


class _Linear(torch.autograd.Function):
    """functional.linear without a gradient of the weight: its factors go to the bucket."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bucket: FactoredBucket
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bucket = bucket
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.bucket.take(grad, x)
        to_input, _, to_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if to_input else None,
            None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if to_bias else None,
            None,
        )
