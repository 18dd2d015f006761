"""Layers that normalise: by the statistics of the batch, or by neighbouring channels."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.layers.layer import Layer
from dmltrain.layers.parameter import AUXILIARY_KINDS, USUAL, Parameter, Rule, Shape
from dmltrain.layers.window import image

MXNET_EPSILON = 0.0010000000474974513  # BatchNorm's default in MXNet: 1e-3 as float32, which float64 results show


@dataclass(frozen=True)
class BatchNorm(Layer):
    """Batch normalisation over channels (Ioffe and Szegedy 2015), by the conventions above. Defaults are MXNet's."""

    epsilon: float = 1e-3
    momentum: float = 0.9
    fixed_scale: bool = True
    gamma_rule: Rule = USUAL
    beta_rule: Rule = USUAL

    def __post_init__(self) -> None:
        self.require(bool(self.name), "needs a name, for its beta")
        self.require(self.epsilon > 0, f"epsilon must be positive, is {self.epsilon}")
        self.require(0 <= self.momentum <= 1, f"momentum must lie in 0..1, is {self.momentum}")

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        beta = self.beta_rule.parameter(f"{self.name}_beta", shape[:1], "beta")
        gamma = self.gamma_rule.parameter(f"{self.name}_gamma", shape[:1], "gamma")
        return (beta,) if self.fixed_scale else (gamma, beta)

    def auxiliary(self, shape: Shape) -> tuple[Parameter, ...]:
        return tuple(Parameter(f"{self.name}_{kind}", shape[:1], kind) for kind in AUXILIARY_KINDS)


@dataclass(frozen=True)
class LayerNorm(Layer):
    """Each pixel of each sample normalised over its channels (Ba et al. 2016), then scaled and shifted by channel."""

    epsilon: float = 1e-5
    gamma_rule: Rule = USUAL
    beta_rule: Rule = USUAL

    def __post_init__(self) -> None:
        self.require(bool(self.name), "needs a name, for its gamma")
        self.require(self.epsilon > 0, f"epsilon must be positive, is {self.epsilon}")

    def output_shape(self, shape: Shape) -> Shape:
        return image(self, shape)

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        gamma = self.gamma_rule.parameter(f"{self.name}_gamma", shape[:1], "gamma")
        return gamma, self.beta_rule.parameter(f"{self.name}_beta", shape[:1], "beta")


@dataclass(frozen=True)
class LocalResponseNorm(Layer):
    """Normalisation across `size` neighbouring channels (Krizhevsky et al. 2012, 3.3). Defaults are MXNet's."""

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    offset: float = 2.0

    def __post_init__(self) -> None:
        self.require(self.size > 0 and self.size % 2 == 1, f"size must be odd and positive, is {self.size}")

    def output_shape(self, shape: Shape) -> Shape:
        return image(self, shape)
