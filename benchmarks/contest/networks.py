"""Networks of the training contests, by name. Every process builds the same network with the same first weights."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dmltrain import models
from dmltrain.backends.torch import layers

EXAMPLES = "mlp:25:100 (25 MB in 100 tensors), resnet-20, resnet-50, alexnet, alexnet-dense"
DENSE = "alexnet-dense"
DENSE_SIZES, DENSE_CLASSES, CONVOLUTIONS = (9216, 4096, 4096), 1000, 2_334_080
FORWARD = 1 / 3  # of a step's computing: backward has two products for each one in forward
CNNS = {  # name -> arguments of models.create; the last is the shape of an image
    "resnet-20": ("resnet", 20, 10, (3, 32, 32)),
    "resnet-50": ("resnet", 50, 10, (3, 32, 32)),
    "alexnet": ("caffe-alexnet", None, 1000, (3, 227, 227)),
}


class UnknownNetwork(ValueError):
    """The message lists what there is."""


@dataclass(frozen=True)
class Made:
    """A network, the shape of one sample and the number of classes."""

    module: nn.Module
    sample: tuple[int, ...]
    classes: int

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.module.parameters())


def check(name: str) -> None:
    """UnknownNetwork if `make` does not know this name."""
    if name not in CNNS and name != DENSE:
        _sizes(name)


def make(name: str, by_layer: float = 0.0, seed: int = 0) -> Made:
    """The network `name`: a CNN, or mlp:MEGABYTES:TENSORS, a perceptron of TENSORS / 2 equal layers, or alexnet-dense:
    AlexNet's dense layers, with as many other weights as its convolutions have, which compute nothing.

    by_layer: seconds that a step sleeps in all, a part in each layer's forward and backward, as if an accelerator
    computed; a CNN, whose layers are one module, sleeps before its forward and before its backward.
    """
    if name == DENSE:
        return _dense_layers(by_layer, seed)
    if name not in CNNS:
        return _perceptron(*_sizes(name), by_layer, seed)
    kind, depth, classes, sample = CNNS[name]
    network = models.create(kind, depth, classes, sample)
    module = layers.build(network)
    layers.initialise(module, network, seed)
    slow = nn.Sequential(Pause(by_layer * FORWARD, 0.0), module, Pause(0.0, by_layer * (1 - FORWARD)))
    return Made(slow if by_layer else module, sample, classes)


class Pause(nn.Module):
    """Sleeps for `forward` seconds when values pass, and for `backward` seconds when their gradients do."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            time.sleep(self.seconds[0])
            return x
        return _Sleep.apply(x, *self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        context.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(context.seconds)
        return gradient, None, None


def _sizes(name: str) -> tuple[float, int]:
    try:
        kind, megabytes, tensors = name.split(":")
        sizes = float(megabytes), int(tensors)
    except ValueError:
        raise UnknownNetwork(f"unknown network {name!r}; expected such as {EXAMPLES}") from None
    if kind != "mlp" or not 0.01 <= sizes[0] <= 10_000 or sizes[1] < 2 or sizes[1] % 2:
        raise UnknownNetwork(f"network {name!r}: expected 0.01 to 10000 MB in an even number of tensors, as {EXAMPLES}")
    return sizes


class _Idle(nn.Module):
    """Weights that take part in communication, but compute nothing: each adds its mean times zero."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean() * 0.0


def _dense_layers(by_layer: float, seed: int) -> Made:
    torch.manual_seed(seed)
    parts: list[nn.Module] = [Pause(by_layer * FORWARD, 0.0)] if by_layer else []
    parts.append(_Idle(CONVOLUTIONS))
    parts += [Pause(0.0, by_layer * (1 - FORWARD))] if by_layer else []
    for inputs, outputs in zip(DENSE_SIZES, (*DENSE_SIZES[1:], DENSE_CLASSES), strict=True):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Made(nn.Sequential(*parts[:-1]), (DENSE_SIZES[0],), DENSE_CLASSES)


def _perceptron(megabytes: float, tensors: int, by_layer: float, seed: int) -> Made:
    depth = tensors // 2
    width = max(2, round(math.sqrt(megabytes * 1e6 / 4 / depth)))  # depth * (width * width + width) values
    pause = by_layer / depth
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.ReLU()]
        parts += [Pause(pause * FORWARD, pause * (1 - FORWARD))] if by_layer else []
    return Made(nn.Sequential(*parts), (width,), width)
