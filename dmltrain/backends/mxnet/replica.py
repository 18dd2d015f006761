"""One replica of the trainer's network: its device (context), its input, its loss and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dmltrain.backends.device import gpu_index
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.base.normalisation import Normalisation

mx = mxnet_compat.load()
NDArray = Any  # mx.nd.NDArray: MXNet has no types


def find_contexts(names: tuple[str, ...]) -> list[Any]:
    """('cpu', 'cpu') -> [mx.cpu(0), mx.cpu(1)]; 'gpu:1' -> mx.gpu(1). Raises UserError for an absent GPU."""
    framework = f"MXNet {mx.__version__}"
    return [
        mx.cpu(index) if name == "cpu" else mx.gpu(gpu_index(name, mx.context.num_gpus(), framework))
        for index, name in enumerate(names)
    ]


class Normalise:
    """Applies `normalisation` to uint8 images, in each of the contexts. Images of another type become float32."""

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


def wait_for(arrays: Iterable[list[NDArray]]) -> None:
    """Wait until MXNet's engine has computed these."""
    for replicas in arrays:
        for replica in replicas:
            replica.wait_to_read()


def cross_entropy(logits: NDArray, labels: NDArray) -> NDArray:
    """Summed over the samples, (1,)."""
    return -mx.nd.log_softmax(logits).pick(labels).sum()


def count(logits: NDArray, labels: NDArray, loss: NDArray, top_k: int) -> NDArray:
    """(samples, correct, correct in top k, cross-entropy) as float64 (4,) on the device."""
    correct = (logits.argmax(axis=1) == labels).sum()
    top = logits.topk(axis=1, k=top_k, ret_typ="mask").pick(labels).sum() if top_k else mx.nd.zeros_like(correct)
    samples = mx.nd.full((1,), len(labels), labels.context)
    return mx.nd.concat(samples, correct, top, loss, dim=0).astype("float64")
