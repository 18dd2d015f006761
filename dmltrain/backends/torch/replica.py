"""One replica of the trainer's network: its device, its input, its compilation, its metrics and statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dmltrain.backends import weights
from dmltrain.backends.device import gpu_index
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.layers import Conv, Network


def find_device(name: str) -> torch.device:
    """'cpu' or 'gpu:0' -> the device. Raises UserError if this machine has no such GPU."""
    if name == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", gpu_index(name, torch.cuda.device_count(), f"PyTorch {torch.__version__}"))


def image_layout(network: Network, name: str) -> torch.memory_format:
    """channels_last makes convolutions faster; a network that only flattens its images would convert them back."""
    convolves = any(isinstance(call.layer, Conv) for call in network.layer_calls)
    return torch.channels_last if name == "channels_last" and convolves else torch.contiguous_format


class Normalise:
    """Applies `normalisation` to uint8 images, on each of the devices. Images of another type stay as they are."""

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


def compiled(module: nn.Module) -> Callable[[torch.Tensor], Any]:
    """torch.compile, which compiles, and can fail, at the first call."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    forward = torch.compile(module)

    def call(images: torch.Tensor) -> Any:
        try:
            return forward(images)
        except TorchDynamoException as error:
            raise UserError(
                f"--compile: {str(error).splitlines()[0][:200]}; on a CPU torch.compile needs a C++ "
                "compiler such as g++, and no space in the path of PyTorch; or leave --compile out"
            ) from error

    return call


def count(logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor, top_k: int) -> torch.Tensor:
    """(samples, correct, correct in top k, cross-entropy) as a float64 tensor (4,) on the device."""
    correct = (logits.argmax(dim=1) == labels).sum()
    top = logits.new_zeros(())
    if top_k:
        top = (logits.topk(top_k, dim=1).indices == labels[:, None]).sum()
    samples = logits.new_full((), len(labels))
    return torch.stack([samples.double(), correct.double(), top.double(), loss.double()])


def statistics(module: nn.Module) -> list[torch.Tensor]:
    """The running means and variances of batch norms, without their counters of batches."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def fill_statistics(replicas: list[list[torch.Tensor]], values: Array) -> None:
    """Write the flat float64 `values` into every replica's buffers."""
    for buffers in replicas:
        parts = weights.split(values, [buffer.shape for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(torch.from_numpy(part))
