"""Layers made of layers: in sequence, or side by side on the same input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dmltrain.layers.layer import Layer, LayerCall, text, texts
from dmltrain.layers.parameter import Shape


@dataclass(frozen=True)
class Chain(Layer):
    """Layers in sequence; without layers it is the identity. Make it with `chain(...)`."""

    layers: tuple[Layer, ...] = ()

    def output_shape(self, shape: Shape) -> Shape:
        for layer in self.layers:
            shape = layer.output_shape(shape)
        return shape

    def trace(self, shape: Shape) -> Iterator[LayerCall]:
        for layer in self.layers:
            yield from layer.trace(shape)
            shape = layer.output_shape(shape)


@dataclass(frozen=True)
class Join(Layer):
    """Base of Concat, Add and Multiply: every branch gets the same input."""

    branches: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        self.require(len(self.branches) >= 2, f"needs at least two branches, has {len(self.branches)}")

    def branch_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return tuple(branch.output_shape(shape) for branch in self.branches)

    def trace(self, shape: Shape) -> Iterator[LayerCall]:
        for branch in self.branches:
            yield from branch.trace(shape)
        yield LayerCall(self, shape, self.output_shape(shape))


@dataclass(frozen=True)
class Concat(Join):
    """Concatenates the branches along axis 1; heights and widths must agree."""

    def output_shape(self, shape: Shape) -> Shape:
        shapes = self.branch_shapes(shape)
        agree = len({shape[1:] for shape in shapes}) == 1
        self.require(agree, f"branches differ in more than channels: {texts(shapes)} from input {text(shape)}")
        return sum(shape[0] for shape in shapes), *shapes[0][1:]


@dataclass(frozen=True)
class Add(Join):
    """Sum of the branches; all shapes must be equal."""

    def output_shape(self, shape: Shape) -> Shape:
        shapes = self.branch_shapes(shape)
        agree = len(set(shapes)) == 1
        self.require(agree, f"branches have different shapes: {texts(shapes)} from input {text(shape)}")
        return shapes[0]


@dataclass(frozen=True)
class Multiply(Join):
    """Product of the branches. The first one has the shape of the result; the others have as many channels, and for
    height and width the same or 1, which stands for all."""

    def output_shape(self, shape: Shape) -> Shape:
        shapes = self.branch_shapes(shape)
        first = shapes[0]
        agree = all(len(other) == len(first) and other[0] == first[0] for other in shapes) and all(
            extent in (1, whole) for other in shapes for extent, whole in zip(other[1:], first[1:], strict=True)
        )
        self.require(agree, f"branches do not fit the first: {texts(shapes)} from input {text(shape)}")
        return first


def chain(*layers: Layer) -> Chain:
    return Chain(layers=layers)


def concat(*branches: Layer, name: str = "") -> Concat:
    return Concat(name, branches)


def add(*branches: Layer, name: str = "") -> Add:
    return Add(name, branches)


def multiply(*branches: Layer, name: str = "") -> Multiply:
    return Multiply(name, branches)
