"""Windows that slide over images: their size, stride and padding, and how many of them fit."""

from __future__ import annotations

from typing import Protocol

from dmltrain.layers.layer import Layer, ShapeError, text
from dmltrain.layers.parameter import Shape

Pair = tuple[int, int]


class PairField:
    """A field that is set to one number or (height, width), and always read as a pair."""

    def __init__(self, default: int) -> None:
        self._default: Pair = (default, default)

    def __set_name__(self, owner: type[Layer], name: str) -> None:
        self._name = name

    def __get__(self, layer: Layer | None, owner: type[Layer]) -> Pair:
        if layer is None:
            return self._default  # for dataclass
        pair: Pair = vars(layer)[self._name]
        return pair

    def __set__(self, layer: Layer, value: Pair | int) -> None:
        pair = (value, value) if isinstance(value, int) else tuple(value)
        layer.require(len(pair) == 2, f"{self._name} must be one number or (height, width), is {value}")
        vars(layer)[self._name] = pair


class Windowed(Protocol):
    """A layer with a window: (height, width) each."""

    @property
    def kernel(self) -> Pair: ...
    @property
    def stride(self) -> Pair: ...
    @property
    def pad(self) -> Pair: ...
    def refuse(self, problem: str) -> ShapeError: ...
    def require(self, condition: bool, problem: str) -> None: ...


def check_window(layer: Windowed) -> None:
    layer.require(min(layer.kernel) > 0, f"kernel must be positive, is {layer.kernel}")
    layer.require(min(layer.stride) > 0, f"stride must be positive, is {layer.stride}")
    layer.require(min(layer.pad) >= 0, f"pad must not be negative, is {layer.pad}")


def image(layer: Layer, shape: Shape) -> tuple[int, int, int]:
    """`shape` as (channels, height, width); ShapeError if it is not an image's."""
    if len(shape) != 3:
        raise layer.refuse(f"input {text(shape)} is not an image (channels, height, width)")
    channels, height, width = shape
    return channels, height, width


def extent(layer: Windowed, shape: Shape, axis: int, up: bool) -> int:
    """Output height (axis 0) or width (axis 1); the fraction of a stride is rounded up or down."""
    room = shape[1 + axis] + 2 * layer.pad[axis] - layer.kernel[axis]
    if room < 0:
        window = f"kernel {text(layer.kernel)}" + (f" with pad {text(layer.pad)}" if any(layer.pad) else "")
        raise layer.refuse(f"{window} is larger than the input {text(shape)}")
    stride = layer.stride[axis]
    return (-(-room // stride) if up else room // stride) + 1
