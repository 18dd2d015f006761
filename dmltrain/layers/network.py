"""A classifier as a value: a tree of layers and the shape of its images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from dmltrain.layers.auxiliary import Auxiliary
from dmltrain.layers.initialisers import HE, Initialiser
from dmltrain.layers.layer import Layer, LayerCall, ShapeError, text
from dmltrain.layers.parameter import Parameter, Shape
from dmltrain.layers.pointwise import StochasticDepth


@dataclass(frozen=True)
class Network:
    """A classifier: `root` maps images of `input_shape` (C, H, W) to `num_classes` logits; the softmax belongs to the
    loss. `initialiser` makes the first values of all weights for which a layer has no rule of its own.

    Creating one raises ShapeError if a layer does not fit its input, two arrays have the same name, or the shape of the
    output or of an auxiliary output is not (num_classes,).
    """

    name: str
    root: Layer
    input_shape: tuple[int, int, int]
    num_classes: int
    initialiser: Initialiser = HE

    def __post_init__(self) -> None:
        names = Counter(array.name for array in (*self.parameters(), *self.auxiliary()))
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ShapeError(f"network {self.name}: two layers share the parameter name {', '.join(twice)}")
        self._check_logits("output", self.output_shape)
        for call in self.layer_calls:
            if isinstance(call.layer, Auxiliary):
                self._check_logits(f"output of {call.layer.label}", call.layer.branch.output_shape(call.input_shape))

    def _check_logits(self, role: str, shape: Shape) -> None:
        if shape != (self.num_classes,):
            expected = f"expected ({self.num_classes},), one logit per class"
            raise ShapeError(f"network {self.name}: {role} is {text(shape)}, {expected}")

    @cached_property
    def layer_calls(self) -> tuple[LayerCall, ...]:
        """Every layer in forward order, with its shapes."""
        return tuple(self.root.trace(self.input_shape))

    @cached_property
    def skips_samples(self) -> bool:
        """Whether samples skip layers by chance in training."""
        return any(isinstance(call.layer, StochasticDepth) for call in self.layer_calls)

    @cached_property
    def output_shape(self) -> Shape:
        return self.root.output_shape(self.input_shape)

    @cached_property
    def auxiliary_outputs(self) -> tuple[Auxiliary, ...]:
        """The layers with a further output, in forward order."""
        return tuple(call.layer for call in self.layer_calls if isinstance(call.layer, Auxiliary))

    def parameters(self) -> list[Parameter]:
        """Learned arrays in forward order."""
        return [array for call in self.layer_calls for array in call.layer.parameters(call.input_shape)]

    def auxiliary(self) -> list[Parameter]:
        """Batch-norm statistics (MXNet's auxiliary states) in forward order."""
        return [array for call in self.layer_calls for array in call.layer.auxiliary(call.input_shape)]

    @cached_property
    def num_parameters(self) -> int:
        """Number of learned values in total."""
        return sum(array.size for array in self.parameters())
