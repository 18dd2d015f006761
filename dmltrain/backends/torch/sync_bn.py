"""Batch norms over the samples of all devices and workers (`--sync-bn 1`), as torch.nn.SyncBatchNorm computes them.

Forward needs the count, the sum and the sum of squares of all replicas, and backward their sums of dy and of dy * xhat:
two sums of a few float64 values for each batch norm. All replicas make the same ones in the same order, those without
samples too, which compute with an empty batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import KVStore

AddUp = Callable[[Tensor], Tensor]  # this replica's values (K,) float64 -> their sum over the replicas of all workers


def batch_norm(
    x: Tensor,
    moving_mean: Tensor,
    moving_var: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    training: bool,
    momentum: float,
    epsilon: float,
    add_up: AddUp | None,
) -> Tensor:
    """functional.batch_norm of x (N, C, ...); in training with the statistics of all replicas if there is `add_up`."""
    if add_up is None or not training:
        return functional.batch_norm(x, moving_mean, moving_var, gamma, beta, training, momentum, epsilon)
    count, mean, variance = _statistics(x.detach(), add_up)
    moving_mean.lerp_(mean, momentum)
    moving_var.lerp_(variance * (count / (count - 1.0).clamp(min=1.0)), momentum)
    result: Tensor = _Normalised.apply(x, gamma, beta, count, mean, variance, epsilon, add_up)  # type: ignore[no-untyped-call]
    return result


def _statistics(x: Tensor, add_up: AddUp) -> tuple[Tensor, Tensor, Tensor]:
    """How many values a channel has in all replicas, their mean and their biased variance (C,): float32, as those of
    functional.batch_norm are. float64 in between: the mean of squares minus the square of the mean loses digits."""
    channels = x.shape[1]
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if x.numel():
        unused = torch.zeros(2, channels, device=x.device)  # whose type the results have
        mean, variance = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        mean, variance = mean.double(), variance.double()
        own = torch.cat([mean, variance + mean * mean, mean.new_ones(1)]) * (x.numel() // channels)
    total = add_up(own)
    mean, squares = (total[:-1] / total[-1]).split(channels)
    return total[-1].float(), mean.float(), (squares - mean * mean).clamp_(min=0.0).float()


class _Normalised(torch.autograd.Function):
    """x normalised by a given mean and variance, which depend on the x of all replicas: with N values in a channel the
    gradient of x from that of y, dy, is gamma / std * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        add_up: AddUp,
    ) -> Tensor:
        context.save_for_backward(x, gamma, count, mean, variance)
        context.epsilon, context.add_up = epsilon, add_up
        return functional.batch_norm(x, mean, variance, gamma, beta, False, 0.0, epsilon)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, count, mean, variance = context.saved_tensors
        dx, dgamma, dbeta = _with_constant_statistics(dy, x, gamma, mean, variance, context.epsilon)
        if context.needs_input_grad[0]:
            of_beta, of_xhat = (context.add_up(torch.cat([dbeta, dgamma]).double()) / count).float().chunk(2)
            inverse = (variance + context.epsilon).rsqrt()
            scale = inverse if gamma is None else inverse * gamma
            slope = scale * inverse * of_xhat
            like = (1, -1) + (1,) * (x.dim() - 2)
            wide = torch.addcmul(dx.float(), x.float(), slope.view(like), value=-1.0)
            dx = wide.add_((slope * mean - scale * of_beta).view(like)).to(x.dtype)
        return dx, None if gamma is None else dgamma, dbeta, None, None, None, None, None


def _with_constant_statistics(
    dy: Tensor, x: Tensor, gamma: Tensor | None, mean: Tensor, variance: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gamma and beta, as if mean and variance did not depend on x. Those of gamma and beta are this
    replica's sums of dy * xhat and of dy."""
    if not x.numel():  # which the operator cannot take
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        dy, x, gamma, mean, variance, None, None, False, epsilon, [True, True, True]
    )
    return found


class Turns:
    """Runs the training of a worker's replicas, one at a time: each stops at a sum until all have come to it, and the
    last one asks the other workers. So random numbers are drawn in the same order in each run. GPUs compute at the same
    time all the same, because they are behind what is asked of them.

    `sum_workers`: the sum over all workers of float64 values on the host; None: there is one worker.
    """

    def __init__(self, sum_workers: Callable[[Array], Array] | None) -> None:
        self._sum_workers = sum_workers
        self._turns: list[threading.Semaphore] = []
        self._parts: list[Tensor] = []
        self._total = torch.empty(0)
        self._error: BaseException | None = None

    def add_up(self, index: int, values: Tensor) -> Tensor:
        """The AddUp of the replica with this number."""
        self._parts.append(values)
        if index + 1 == len(self._turns):
            self._total, self._parts = self._summed(self._parts), []
        if len(self._turns) > 1:
            self._pass_on(index)
            self._turns[index].acquire()
        if self._error:
            raise RuntimeError("another device has failed") from self._error
        return self._total.to(values.device)

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        total = torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
        return torch.from_numpy(self._sum_workers(total.cpu().numpy())) if self._sum_workers else total

    def _pass_on(self, index: int) -> None:
        self._turns[(index + 1) % len(self._turns)].release()

    def run(self, trainings: Sequence[Callable[[], None]]) -> None:
        """One for each replica. The first error ends all of them, and is raised."""
        self._error, self._parts = None, []
        self._turns = [threading.Semaphore(0) for _ in trainings]
        others = [
            threading.Thread(target=self._run, args=(index, training), daemon=True, name=f"dmltrain device {index}")
            for index, training in enumerate(trainings)
            if index
        ]
        for thread in others:
            thread.start()
        self._turns[0].release()
        self._run(0, trainings[0])
        for thread in others:
            if self._error:
                break
            thread.join()
        if self._error:
            raise self._error

    def _run(self, index: int, training: Callable[[], None]) -> None:
        self._turns[index].acquire()
        try:
            if not self._error:
                training()
        except BaseException as error:
            self._error = self._error or error
        self._pass_on(index)


def join(modules: Sequence[nn.Module], store: KVStore) -> Turns | None:
    """From now on the batch norms of these replicas, one for each device, have the statistics of all devices and
    workers. Returns what must run their training; None if there is one replica in all, which has them already."""
    if len(modules) * store.num_workers == 1:
        return None
    sums = partial(store.all_reduce, "batch-norm sums") if store.num_workers > 1 else None
    turns = Turns(sums)
    for index, module in enumerate(modules):
        module.add_up = partial(turns.add_up, index)  # type: ignore[assignment]  # an attribute of layers.build's
    return turns
