"""Layers that change each value alone, or only the shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dmltrain.layers.layer import Layer, Shape


@dataclass(frozen=True)
class Relu(Layer):
    """max(x, 0)"""


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh(x)"""


@dataclass(frozen=True)
class Flatten(Layer):
    """(C, H, W) -> (C * H * W,), channels outermost."""

    def output_shape(self, shape: Shape) -> Shape:
        return (prod(shape),)


@dataclass(frozen=True)
class Dropout(Layer):
    """Sets each value to zero with probability `rate` in training."""

    rate: float = 0.5

    def __post_init__(self) -> None:
        self.require(0 <= self.rate < 1, f"rate must lie in 0..1 (1 excluded), is {self.rate}")
