"""Layers that change each value alone, or only the shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dmltrain.layers.layer import Layer
from dmltrain.layers.parameter import Shape


@dataclass(frozen=True)
class Relu(Layer):
    """max(x, 0)"""


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh(x)"""


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-x))"""


@dataclass(frozen=True)
class Silu(Layer):
    """x times its sigmoid, also called swish."""


@dataclass(frozen=True)
class Gelu(Layer):
    """x times the normal distribution function of x, exactly, not by the approximation with tanh."""


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


@dataclass(frozen=True)
class StochasticDepth(Dropout):
    """Dropout of whole samples: at the end of a residual branch, so that a sample skips it (Huang et al. 2016)."""


@dataclass(frozen=True)
class Scale(Layer):
    """x times a constant."""

    factor: float = 1.0


@dataclass(frozen=True)
class Clip(Layer):
    """x, but at least `low` and at most `high`; the defaults make it ReLU6. The gradient passes where x is in between,
    bounds included."""

    low: float = 0.0
    high: float = 6.0

    def __post_init__(self) -> None:
        self.require(self.low < self.high, f"low must be less than high, are {self.low} and {self.high}")
