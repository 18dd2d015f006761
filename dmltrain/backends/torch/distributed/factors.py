"""Sufficient factors: the gradient of a dense layer, sent as the two matrices whose product it is.

A dense layer's weights (M, N) have the gradient D^T X. The rows of D (K, M) are the gradients of the layer's outputs,
those of X (K, N) its inputs, one for each of a worker's K samples. While K is small, both together have far fewer
elements than the gradient. So each worker sends its D and X to all others, and computes the sum of all gradients
itself: one product over the samples of all workers, in the order of their ranks. (Xie et al. 2015, "Distributed Machine
Learning via Sufficient Factor Broadcasting", arXiv:1511.08486, section 3; Zhang et al. 2015, "Poseidon",
arXiv:1512.06216, section 4.2.)

A layer is recognised when torch applies it: parameter_hooks.py replaces `functional.linear` by `FactoredBucket.linear`
if the weight is a FactoredBucket's. Its backward keeps D and X, and computes no gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from dmltrain.backends.torch.distributed.buckets import CHANGED, Bucket, with_gradients
from dmltrain.backends.torch.gpu.pinned import PushedMemory
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.encoded import Encoding


class FactoredBucket(Bucket):
    """The weight of one dense layer, whose gradient is sent as factors. `rows`: samples of a worker's step, at most.

    The weight's own gradient is never computed. After backward its `grad` is a marker, a tensor with undefined values.
    If `grad` is no longer the marker, the program has discarded the gradient.
    """

    def __init__(self, name: str, group: int, priority: int, weight: torch.nn.Parameter, rows: int) -> None:
        super().__init__(name, group, priority, [weight])
        self.weight, self.rows = weight, rows
        self.keys = [f"{name} outputs", f"{name} inputs"]
        self.sizes = [rows * width for width in weight.shape]
        self._sent = [np.zeros((rows, width), np.float32) for width in weight.shape]
        self._filled = 0  # rows of them
        self._new: list[tuple[int, list[torch.Tensor]]] = []  # factors of a backward (its number) that has not ended

    def lay_out(self, memory: Array, keep: bool = False, encodings: Sequence[Encoding] = ()) -> None:
        raise NotImplementedError("gradients are computed here, not received")

    def prepare(self, store: KVStore) -> None:
        """Declare the factors, take worker 0's weights, and make memory for the gradient."""
        store.init_gathered(self.keys, self.sizes)
        weights = self.weights.on_host()
        store.broadcast(weights.view(np.uint8), needed=store.rank != 0)
        self.weights.set(torch.from_numpy(weights))
        self.host = PushedMemory(np.empty(0), torch.device("cpu"))  # nothing is copied to it
        self.gradients = torch.empty(self.weight.numel(), dtype=self.weight.dtype, device=self.device)
        self.views = self.places.cut(self.gradients)
        (self._marker,) = self.places.cut(self.gradients)  # another tensor of the same memory
        self._version = self.gradients._version

    @property
    def ready(self) -> bool:
        return self._filled > 0

    @property
    def has_gradients(self) -> bool:
        return self.weight.grad is None or self.weight.grad is self._marker or self.weight.grad is self.views[0]

    def missing(self) -> torch.nn.Parameter | None:
        """No gradient is ever missing: without factors it is a product of zeros."""
        return None

    def begin(self) -> None:
        super().begin()
        self._filled = 0
        self._version = self.gradients._version

    def accumulate(self) -> None:
        """The rows of the next backward are added to those of this one."""

    def discard(self) -> None:
        """Forget the gradient, unless it has been sent."""
        if not self.pushed:
            self._filled, self.weight.grad = 0, None

    def watch(self, when_ready: Callable[[Bucket], None]) -> list[RemovableHandle]:
        def hook(_: torch.Tensor) -> None:
            if not self.pushed:
                self._collect_factors()
            when_ready(self)

        return [self.weight.register_post_accumulate_grad_hook(hook)]

    def complete(self) -> None:
        """Without a backward since the last step, or after zero_grad(), the factors are zeros."""
        self._check_gradient()
        if self.weight.grad is not self._marker:
            self._filled = 0

    def _check_gradient(self) -> None:
        """UserError if the weight has a gradient that is not sent. A gradient of zeros adds nothing."""
        gradient = self.weight.grad
        other = not self.has_gradients and gradient is not None and bool(gradient.any())
        if other or (gradient is self._marker and self.gradients._version != self._version):
            raise UserError(
                f"the weight of {tuple(self.weight.shape)} whose gradient is sent as factors has a gradient from "
                "outside of its dense layer: it is also used elsewhere, its module is called alone, or the program has "
                "set its gradient; train without factors (--factors off)"
            )

    def weigh(self, weight: float) -> None:
        if weight == 0.0:
            self._filled = 0
        elif weight != 1.0:
            self._sent[0][: self._filled] *= weight

    # -- forward and backward -------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """functional.linear, with the factors of the weight's gradient kept in backward."""
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return functional.linear(x, weight, bias)
        product: torch.Tensor = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return product

    def take(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Keep the factors of the running backward: gradients of outputs (..., M) and inputs (..., N). They count only
        when this backward reaches the weight; torch.autograd.grad with respect to the inputs never does."""
        parts = [factor.detach().reshape(-1, factor.shape[-1]) for factor in (grad, x)]
        if any(part.dtype != torch.float32 for part in parts):
            raise UserError(
                f"factors must be float32, these are {parts[0].dtype}: train in float32, or without factors "
                "(--factors off)"
            )
        self._new.append((_backward_number(), parts))

    def _collect_factors(self) -> None:
        """This backward has reached the weight."""
        self._check_gradient()
        if self.weight.grad is not self._marker:  # the program has discarded what was there
            self._filled = 0
        number, new = _backward_number(), self._new
        self._new = []
        for parts in (parts for backward_number, parts in new if backward_number == number):
            self._add(parts)
        self.weight.grad = self._marker
        self._version = self.gradients._version

    def _add(self, parts: list[torch.Tensor]) -> None:
        count = len(parts[0])
        if self._filled + count > self.rows:
            raise UserError(
                f"a step has more than {self.rows} samples for the dense layer of {tuple(self.weight.shape)}, whose "
                "gradient is sent as factors: give `factors` the largest number of a worker's step (samples, times "
                "positions for inputs with these), or train without factors"
            )
        for kept, part in zip(self._sent, parts, strict=True):
            kept[self._filled : self._filled + count] = part.cpu().numpy()
        self._filled += count

    def gather(self) -> None:
        """The factors are on the host already."""

    def freeze(self) -> bool:
        return False

    # -- all workers ----------------------------------------------------------------------------------------------

    def send(self, store: KVStore) -> Handle:
        """Send the factors; the handle's values are those of all workers."""
        for kept in self._sent:
            kept[self._filled :] = 0.0  # a row of zeros adds nothing
        return store.gather(self.keys, [kept.reshape(-1) for kept in self._sent], self.priority)

    def factor_to_mean(self, store: KVStore) -> float:
        return 1.0 / store.num_workers

    def check_unchanged(self) -> None:
        if self.gradients._version != self._version:
            raise UserError(CHANGED)

    def take_result(self, handle: Handle, factor: float) -> None:
        """Set the weight's gradient to the sum over all workers times `factor`."""
        super().take_result(handle, factor)
        self.weight.grad = self.views[0]

    def result_in_place(self, handle: Handle, factor: float, copied: bool = False) -> AbstractContextManager[None]:
        self.receive(handle, factor)
        return with_gradients(self.parameters, self.views)

    def receive(self, handle: Handle, factor: float) -> None:
        outputs, inputs = (
            torch.from_numpy(values.reshape(-1, width)).to(self.device)
            for values, width in zip(handle.values, self.weight.shape, strict=True)
        )
        torch.mm((outputs * factor if factor != 1.0 else outputs).t(), inputs, out=self.views[0])


def _backward_number() -> int:
    """The number of the backward that runs on this thread."""
    return int(torch._C._current_graph_task_id())


class _Linear(torch.autograd.Function):
    """functional.linear without a gradient of the weight: its factors go to the bucket."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bucket: FactoredBucket
    ) -> torch.Tensor:
        ctx.save_for_backward(x)  # not the weight: see backward
        ctx.bucket, ctx.version = bucket, weight._version
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors  # with torch.utils.checkpoint, tensors of another forward, which may differ in number
        weight = ctx.bucket.weight
        if weight._version != ctx.version:
            raise UserError("a weight was changed between forward and backward: call optimizer.step() after backward()")
        ctx.bucket.take(grad, x)
        to_input, _, to_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if to_input else None,
            None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if to_bias else None,
            None,
        )
