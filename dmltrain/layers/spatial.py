"""Layers that sample images anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dmltrain.layers.joins import Chain
from dmltrain.layers.layer import Layer, LayerCall, text
from dmltrain.layers.parameter import Shape
from dmltrain.layers.window import PairField, image

AFFINE = 6  # numbers of an affine map of the plane: two rows of (x, y, 1)
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class SpatialTransformer(Layer):
    """Samples each image where its affine map says (Jaderberg et al. 2015; MXNet's operator SpatialTransformer).

    The branch `localisation` computes the map's six numbers, row by row, from the input. The map takes the place (x, y)
    in an output of extent `target` (height, width) to a place in the input. Both are measured from -1 to 1, which are
    the centres of the first and of the last pixel. The value there is interpolated from the four nearest pixels;
    outside of the image, pixels are zeros.
    """

    localisation: Layer = Chain()
    target: PairField = PairField(28)

    def __post_init__(self) -> None:
        self.require(min(self.target) > 1, f"target must be at least 2 pixels high and wide, is {self.target}")

    def output_shape(self, shape: Shape) -> Shape:
        numbers = self.localisation.output_shape(shape)
        self.require(numbers == (AFFINE,), f"its localisation gives {text(numbers)}, expected {AFFINE} numbers")
        return image(self, shape)[0], *self.target

    def trace(self, shape: Shape) -> Iterator[LayerCall]:
        yield from self.localisation.trace(shape)
        yield LayerCall(self, shape, self.output_shape(shape))
