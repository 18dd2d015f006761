"""Operators of networks that PyTorch lacks, or has in a slower form.

Local response normalisation has a gradient of its own: torch.nn.functional.local_response_norm sums over channels by a
pooling of a five-dimensional tensor and keeps every intermediate result for the backward pass: a quarter of AlexNet's
step on a CPU. Here the sum is one of slices.

Sampling at other places is done as MXNet's SpatialTransformer does it (src/operator/spatial_transformer.cc).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def response_norm(x: Tensor, size: int, alpha: float, beta: float, offset: float) -> Tensor:
    """x (N, C, H, W) / (offset + alpha / size * sum of squares over `size` neighbouring channels) ^ beta; `size` is
    odd. Half precisions are computed in float32."""
    result: Tensor = _ResponseNorm.apply(x, size, alpha, beta, offset)  # type: ignore[no-untyped-call]
    return result


class _ResponseNorm(torch.autograd.Function):
    """With s = offset + alpha / size * sum(x^2): y = x s^-beta, and the gradient of x from that of y, g, is
    g s^-beta - 2 alpha beta / size * x * sum(g x s^(-beta - 1))."""

    @staticmethod
    def forward(context: Any, x: Tensor, size: int, alpha: float, beta: float, offset: float) -> Tensor:
        wide = _wide(x)
        base = _over_channels(wide * wide, size).mul_(alpha / size).add_(offset)
        scale = base.pow(-beta)
        context.save_for_backward(x, base, scale)
        context.constants = size, 2 * alpha * beta / size
        return (wide * scale).to(x.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, base, scale = context.saved_tensors
        size, factor = context.constants
        wide, direct = _wide(x), _wide(gradients[0]) * scale
        across = _over_channels((direct * wide).div_(base), size)
        return direct.sub_(across.mul_(wide), alpha=factor).to(x.dtype), None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _over_channels(values: Tensor, size: int) -> Tensor:
    """The sum of each value and its size // 2 neighbours on both sides along axis 1."""
    if size == 1:
        return values
    padded = functional.pad(values, (0, 0, 0, 0, size // 2, size // 2))
    first, second, *others = (padded.narrow(1, start, values.shape[1]) for start in range(size))
    total = first + second
    for other in others:
        total += other
    return total


def channel_norm(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """x (N, C, H, W), each pixel normalised over its channels, times gamma (C,) plus beta (C,)."""
    last = functional.layer_norm(x.permute(0, 2, 3, 1), gamma.shape, gamma, beta, epsilon)
    return last.permute(0, 3, 1, 2)


def drop_samples(x: Tensor, rate: float, training: bool) -> Tensor:
    """x (N, ...); in training each sample is 0 with probability `rate`, and the others are divided by 1 - rate."""
    if not training or not rate:
        return x
    kept = torch.empty((len(x), *(1 for _ in x.shape[1:])), dtype=x.dtype, device=x.device).bernoulli_(1.0 - rate)
    return x * kept.div_(1.0 - rate)


def sample_affine(images: Tensor, maps: Tensor, target: tuple[int, int]) -> Tensor:
    """Images (N, C, *target) whose pixel at (x, y) is that of `images` (N, C, H, W) at the affine map (N, 6) of (x, y).

    Coordinates are computed as MXNet computes them, without a matrix product and never in a half type. Where a map
    takes pixels exactly to pixels, as the identity does, the last bit decides which pixels are the neighbours, and
    hence the gradient.
    """
    kind = torch.promote_types(images.dtype, torch.float32)
    x, y = (_centres(count, images.device, kind) for count in reversed(target))
    of_x, of_y, shift = maps.to(kind).view(-1, 1, 1, 2, 3).unbind(-1)  # (N, 1, 1, 2) each
    places = of_x * x.view(1, 1, -1, 1) + of_y * y.view(1, -1, 1, 1) + shift  # (N, height, width, 2)
    sampled = functional.grid_sample(images.to(kind), places, padding_mode="zeros", align_corners=True)
    return sampled.to(images.dtype)


def _centres(count: int, device: torch.device, kind: torch.dtype) -> Tensor:
    """Pixel centres from -1 to 1, rounded from float64 once."""
    return (torch.arange(count, device=device, dtype=torch.float64) * 2.0 / (count - 1) - 1.0).to(kind)
