"""Layers that take the mean or the maximum of each window."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.layers.layer import Layer, text
from dmltrain.layers.parameter import Shape
from dmltrain.layers.window import PairField, check_window, extent, image


@dataclass(frozen=True)
class Pool(Layer):
    """Base of both poolings: the window, and how the output's extent is rounded ("valid" down, "full" up)."""

    kernel: PairField = PairField(2)
    stride: PairField = PairField(1)
    pad: PairField = PairField(0)
    rounding: str = "valid"

    def __post_init__(self) -> None:
        check_window(self)
        self.require(self.rounding in ("valid", "full"), f'rounding must be "valid" or "full", is {self.rounding!r}')
        fits = all(2 * pad <= kernel for pad, kernel in zip(self.pad, self.kernel, strict=True))
        self.require(fits, f"pad {self.pad} is more than half of the kernel {self.kernel}")

    def output_shape(self, shape: Shape) -> Shape:
        channels, _, _ = image(self, shape)
        extents = tuple(extent(self, shape, axis, up=self.rounding == "full") for axis in (0, 1))
        for axis, count in enumerate(extents):
            start = (count - 1) * self.stride[axis] - self.pad[axis]  # of the last window, in input pixels
            self.require(start < shape[1 + axis], f"its last window lies entirely outside the input {text(shape)}")
        return channels, *extents


@dataclass(frozen=True)
class MaxPool(Pool):
    """Largest value of each window."""


@dataclass(frozen=True)
class AvgPool(Pool):
    """Mean of each window; padded zeros count as values unless `count_padding` is false."""

    count_padding: bool = True


@dataclass(frozen=True)
class GlobalAvgPool(Layer):
    """Mean over height and width: (C, H, W) -> (C, 1, 1)."""

    def output_shape(self, shape: Shape) -> Shape:
        return image(self, shape)[0], 1, 1
