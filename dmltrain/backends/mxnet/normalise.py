"""Normalises uint8 images on their device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.base.normalisation import Normalisation

mx = mxnet_compat.load()
NDArray = Any  # mx.nd.NDArray: MXNet has no types


class Normalise:
    """`normalisation` in each of the contexts; images of another type than uint8 become float32."""

    def __init__(self, normalisation: Normalisation | None, contexts: Sequence[Any]) -> None:
        arrays = () if normalisation is None else (normalisation.subtrahend(), normalisation.factor())
        self._values = [
            [mx.nd.array(array[None], context, dtype="float32") for array in arrays] for context in contexts
        ]

    def __call__(self, index: int, images: NDArray) -> NDArray:
        """The network's input for images (N, C, H, W) in context `index`."""
        if images.dtype != np.uint8:
            return images.astype("float32", copy=False)
        if not self._values[index]:
            raise ValueError("uint8 images, but the trainer was made without a normalisation")
        mean, factor = self._values[index]
        # the operations of Normalisation.apply
        return mx.nd.broadcast_mul(mx.nd.broadcast_sub(images.astype("float32"), mean), factor)
