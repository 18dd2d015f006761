"""Images sampled at other places, as MXNet's SpatialTransformer does it (src/operator/spatial_transformer.cc)."""

from __future__ import annotations

import torch
from torch.nn import functional


def sample_affine(images: torch.Tensor, maps: torch.Tensor, target: tuple[int, int]) -> torch.Tensor:
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


def _centres(count: int, device: torch.device, kind: torch.dtype) -> torch.Tensor:
    """Pixel centres from -1 to 1, rounded from float64 once."""
    return (torch.arange(count, device=device, dtype=torch.float64) * 2.0 / (count - 1) - 1.0).to(kind)
