"""Layers that multiply by learned weights."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.layers.layer import Layer, text
from dmltrain.layers.parameter import USUAL, Parameter, Rule, Shape
from dmltrain.layers.window import PairField, check_window, extent, image


@dataclass(frozen=True)
class Conv(Layer):
    """2-d convolution. `kernel`, `stride`, `pad` are (height, width) or one number for both."""

    channels: int = 0
    kernel: PairField = PairField(1)
    stride: PairField = PairField(1)
    pad: PairField = PairField(0)
    bias: bool = True
    groups: int = 1
    weight_rule: Rule = USUAL
    bias_rule: Rule = USUAL

    def __post_init__(self) -> None:
        self.require(bool(self.name), "needs a name, for its weight")
        self.require(self.channels > 0, f"channels must be positive, is {self.channels}")
        divides = self.groups > 0 and self.channels % self.groups == 0
        self.require(divides, f"{self.channels} channels do not divide into {self.groups} groups")
        check_window(self)

    def output_shape(self, shape: Shape) -> Shape:
        divides = image(self, shape)[0] % self.groups == 0
        self.require(divides, f"the channels of input {text(shape)} do not divide into {self.groups} groups")
        return self.channels, *(extent(self, shape, axis, up=False) for axis in (0, 1))

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        return _weight_and_bias(self, (self.channels, shape[0] // self.groups, *self.kernel))


@dataclass(frozen=True)
class Dense(Layer):
    """Fully connected layer on a flat input."""

    features: int = 0
    bias: bool = True
    weight_rule: Rule = USUAL
    bias_rule: Rule = USUAL

    def __post_init__(self) -> None:
        self.require(bool(self.name), "needs a name, for its weight")
        self.require(self.features > 0, f"features must be positive, is {self.features}")

    def output_shape(self, shape: Shape) -> Shape:
        self.require(len(shape) == 1, f"input {text(shape)} is not flat; put a Flatten before it")
        return (self.features,)

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        return _weight_and_bias(self, (self.features, shape[0]))


def _weight_and_bias(layer: Conv | Dense, shape: Shape) -> tuple[Parameter, ...]:
    """The weight of `shape` (outputs, ...), and a bias for each output if the layer has one."""
    weight = layer.weight_rule.parameter(f"{layer.name}_weight", shape, "weight")
    bias = layer.bias_rule.parameter(f"{layer.name}_bias", shape[:1], "bias")
    return (weight, bias) if layer.bias else (weight,)
