"""Normalises uint8 images on their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmltrain.base.normalisation import Normalisation


class Normalise:
    """`normalisation` on each of the devices; images of another type than uint8 stay as they are."""

    def __init__(self, normalisation: Normalisation | None, devices: Sequence[torch.device]) -> None:
        arrays = () if normalisation is None else (normalisation.subtrahend(), normalisation.factor())
        self._values = [[torch.from_numpy(array).to(device) for array in arrays] for device in devices]

    def __call__(self, index: int, images: torch.Tensor) -> torch.Tensor:
        """The network's input for images (N, C, H, W) on device `index`, in the same memory format."""
        if images.dtype != torch.uint8:
            return images
        if not self._values[index]:
            raise ValueError("uint8 images, but the trainer was made without a normalisation")
        mean, factor = self._values[index]
        return images.float().sub_(mean).mul_(factor)  # the operations of Normalisation.apply
