"""What all layers have in common: the questions that a layer answers about itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dmltrain.layers.parameter import Parameter, Shape


class ShapeError(ValueError):
    """A layer does not fit its input: the message names the layer, the shapes and what was expected."""


@dataclass(frozen=True)
class LayerCall:
    """One layer of the tree in forward order, with its shapes per sample."""

    layer: Layer
    input_shape: Shape
    output_shape: Shape


@dataclass(frozen=True)
class Layer:
    """Base of all layers. `name` may be empty for layers without parameters; errors then show the layer's type."""

    name: str = ""

    @property
    def label(self) -> str:
        kind = type(self).__name__
        return f"{kind} {self.name!r}" if self.name else kind

    def output_shape(self, shape: Shape) -> Shape:
        """The shape of the output. Raises ShapeError if the input's `shape` does not fit."""
        return shape

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        """The layer's own learned arrays for an input of `shape`, in MXNet's order."""
        return ()

    def auxiliary(self, shape: Shape) -> tuple[Parameter, ...]:
        """The layer's own arrays that are not learned by gradients."""
        return ()

    def trace(self, shape: Shape) -> Iterator[LayerCall]:
        """This layer and every layer below it, in forward order."""
        yield LayerCall(self, shape, self.output_shape(shape))

    def refuse(self, problem: str) -> ShapeError:
        return ShapeError(f"{self.label}: {problem}")

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise self.refuse(problem)


def text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def texts(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(text, shapes))
