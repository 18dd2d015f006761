"""How pixels become the network's input: (pixel - mean) / std. A data set has the values, a trainer applies them.

Images stay uint8 until they are on the device, a quarter of the bytes of float32. Every framework does the same two
operations in float32, in this order, so that the results do not depend on where they run: subtract the mean, then
multiply by 1 / std.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array


@dataclass(frozen=True, eq=False)
class Normalisation:
    """In units of the uint8 pixels. mean: one number for all channels, one for each, or an image (C, H, W); std: one
    number for all channels, or one for each."""

    mean: tuple[float, ...] | Array = (0.0,)
    std: tuple[float, ...] = (255.0,)

    def subtrahend(self) -> Array:
        """The mean, float32 (1 or C, 1, 1) or (C, H, W)."""
        mean = np.asarray(self.mean, np.float32)
        return mean if mean.ndim == 3 else mean[:, None, None]

    def factor(self) -> Array:
        """1 / std, float32 (1 or C, 1, 1)."""
        return (1 / np.array(self.std)).astype(np.float32)[:, None, None]

    def apply(self, images: Array) -> Array:
        """The input for images uint8 (n, C, H, W): float32, C-contiguous. What a trainer does on its device."""
        result = images.astype(np.float32, order="C")
        result -= self.subtrahend()
        result *= self.factor()
        return result
