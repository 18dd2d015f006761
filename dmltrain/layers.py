"""Layers and networks as frozen values that compute their shapes and parameters without any framework.

A network is a tree. Its leaves are layers with one input. `Chain` runs layers in sequence; `Concat` and `Add` give the
same input to several branches and join their outputs. An empty `Chain` is the identity (a residual shortcut). Each
backend builds its own modules from the tree.

Shapes are per sample: `(channels, height, width)` for images, `(features,)` after `Flatten`. Names are MXNet's
(`conv0_weight`, `bn0_gamma`, `bn0_moving_mean`), so that both can read the same parameter files.

Every backend must follow these conventions (MXNet 1.9.1's, unless stated otherwise):

* Convolution is cross-correlation, weight `(channels, input_channels / groups, height, width)`, zero padding on both
  sides, output extent `floor((x + 2 pad - kernel) / stride) + 1`.
* `Dense` computes `x W^T + b` with weight `(features, input_features)` and needs a flat input.
* `BatchNorm.momentum` is the fraction of the OLD statistics that is kept (PyTorch's is one minus this):
  `moving = momentum * moving + (1 - momentum) * batch`. `epsilon` is added to the variance under the root. The batch is
  normalised with its biased variance (divided by n = samples x height x width). Whether `moving_var` uses the biased or
  the unbiased (n - 1) variance differs between frameworks: MXNet uses the biased one on CPUs, PyTorch and cuDNN the
  unbiased one. The two differ by the factor n / (n - 1), and training depends on it in no other place.
* `fixed_scale` is MXNet's `fix_gamma=True`: gamma is the constant 1, hence not a parameter. MXNet's files contain it
  nevertheless, as an array of ones.
* Max pooling ignores padding, average pooling pads with zeros. The average counts padded zeros (MXNet's default) unless
  `count_padding` is false. `rounding` is MXNet's `pooling_convention`: "valid" rounds the extent `(x + 2 pad - kernel)
  / stride + 1` down, "full" rounds it up (as Caffe does, and MXNet did before it got the option in 2016). With "full"
  the last window may extend beyond the padding; the average does not count that part. A window entirely outside the
  input is an error, because frameworks disagree about it.
  (MXNet 1.9.1's oneDNN computes a wrong float32 gradient for such an average that counts padding; the mxnet backend
  avoids that case.)
* `LocalResponseNorm`: `x / (offset + alpha / size * sum of squares over size neighbouring channels) ^ beta`.
* `Dropout` scales the remaining values by `1 / (1 - rate)` in training and does nothing otherwise.

With equal weights the backends agree to 1e-9 in float64, and in float32 to 1e-4 of logits and gradient, as far as no
ReLU and no maximum is so close that rounding decides it: each such decision may change a deep network's gradient by a
percent, in either framework. Networks that magnify rounding lose more: resnet-164 with its initial weights is at 3e-4
(figures in tests/backends/test_same_mathematics_float32.py). Gradients that a batch norm makes zero, such as that of a
bias right before it, are noise in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

Shape = tuple[int, ...]
Pair = tuple[int, int]
LEARNED_KINDS = ("weight", "bias", "gamma", "beta")
AUXILIARY_KINDS = ("moving_mean", "moving_var")


class ShapeError(ValueError):
    """A layer does not fit its input: the message names the layer, the shapes and what was expected."""


@dataclass(frozen=True)
class Parameter:
    """One array of a network. `kind` is one of `LEARNED_KINDS` or, for batch-norm statistics, of `AUXILIARY_KINDS`."""

    name: str
    shape: Shape
    kind: str

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Step:
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

    def multiply_adds(self, shape: Shape) -> int:
        """Multiply-adds of one sample's forward pass (convolutions and dense layers; the rest is negligible)."""
        return 0

    def trace(self, shape: Shape) -> Iterator[Step]:
        """This layer and every layer below it, in forward order."""
        yield Step(self, shape, self.output_shape(shape))

    def refuse(self, problem: str) -> ShapeError:
        return ShapeError(f"{self.label}: {problem}")

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise self.refuse(problem)


class _PairField:
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
        layer._require(len(pair) == 2, f"{self._name} must be one number or (height, width), is {value}")
        vars(layer)[self._name] = pair


@dataclass(frozen=True)
class Conv(Layer):
    """2-d convolution. `kernel`, `stride`, `pad` are (height, width) or one number for both."""

    channels: int = 0
    kernel: _PairField = _PairField(1)
    stride: _PairField = _PairField(1)
    pad: _PairField = _PairField(0)
    bias: bool = True
    groups: int = 1

    def __post_init__(self) -> None:
        self._require(bool(self.name), "needs a name, for its weight")
        self._require(self.channels > 0, f"channels must be positive, is {self.channels}")
        divides = self.groups > 0 and self.channels % self.groups == 0
        self._require(divides, f"{self.channels} channels do not divide into {self.groups} groups")
        _check_window(self)

    def output_shape(self, shape: Shape) -> Shape:
        divides = _image(self, shape)[0] % self.groups == 0
        self._require(divides, f"the channels of input {_text(shape)} do not divide into {self.groups} groups")
        return self.channels, *(_extent(self, shape, axis, up=False) for axis in (0, 1))

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        weight = Parameter(f"{self.name}_weight", (self.channels, shape[0] // self.groups, *self.kernel), "weight")
        return (weight, Parameter(f"{self.name}_bias", (self.channels,), "bias")) if self.bias else (weight,)

    def multiply_adds(self, shape: Shape) -> int:
        return prod(self.output_shape(shape)) * shape[0] // self.groups * prod(self.kernel)


@dataclass(frozen=True)
class Dense(Layer):
    """Fully connected layer on a flat input."""

    features: int = 0
    bias: bool = True

    def __post_init__(self) -> None:
        self._require(bool(self.name), "needs a name, for its weight")
        self._require(self.features > 0, f"features must be positive, is {self.features}")

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) == 1, f"input {_text(shape)} is not flat; put a Flatten before it")
        return (self.features,)

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        weight = Parameter(f"{self.name}_weight", (self.features, shape[0]), "weight")
        return (weight, Parameter(f"{self.name}_bias", (self.features,), "bias")) if self.bias else (weight,)

    def multiply_adds(self, shape: Shape) -> int:
        return self.features * shape[0]


@dataclass(frozen=True)
class BatchNorm(Layer):
    """Batch normalisation over channels (Ioffe and Szegedy 2015), by the conventions above. Defaults are MXNet's."""

    epsilon: float = 1e-3
    momentum: float = 0.9
    fixed_scale: bool = True

    def __post_init__(self) -> None:
        self._require(bool(self.name), "needs a name, for its beta")
        self._require(self.epsilon > 0, f"epsilon must be positive, is {self.epsilon}")
        self._require(0 <= self.momentum <= 1, f"momentum must lie in 0..1, is {self.momentum}")

    def parameters(self, shape: Shape) -> tuple[Parameter, ...]:
        beta = Parameter(f"{self.name}_beta", shape[:1], "beta")
        return (beta,) if self.fixed_scale else (Parameter(f"{self.name}_gamma", shape[:1], "gamma"), beta)

    def auxiliary(self, shape: Shape) -> tuple[Parameter, ...]:
        return tuple(Parameter(f"{self.name}_{kind}", shape[:1], kind) for kind in AUXILIARY_KINDS)


@dataclass(frozen=True)
class Relu(Layer):
    """max(x, 0)"""


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh(x)"""


@dataclass(frozen=True)
class Pool(Layer):
    """Base of both poolings: the window, and how the output's extent is rounded ("valid" down, "full" up)."""

    kernel: _PairField = _PairField(2)
    stride: _PairField = _PairField(1)
    pad: _PairField = _PairField(0)
    rounding: str = "valid"

    def __post_init__(self) -> None:
        _check_window(self)
        self._require(self.rounding in ("valid", "full"), f'rounding must be "valid" or "full", is {self.rounding!r}')
        fits = all(2 * pad <= kernel for pad, kernel in zip(self.pad, self.kernel, strict=True))
        self._require(fits, f"pad {self.pad} is more than half of the kernel {self.kernel}")

    def output_shape(self, shape: Shape) -> Shape:
        channels, _, _ = _image(self, shape)
        extents = tuple(_extent(self, shape, axis, up=self.rounding == "full") for axis in (0, 1))
        for axis, extent in enumerate(extents):
            start = (extent - 1) * self.stride[axis] - self.pad[axis]  # of the last window, in input pixels
            self._require(start < shape[1 + axis], f"its last window lies entirely outside the input {_text(shape)}")
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
        return _image(self, shape)[0], 1, 1


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
        self._require(0 <= self.rate < 1, f"rate must lie in 0..1 (1 excluded), is {self.rate}")


@dataclass(frozen=True)
class LocalResponseNorm(Layer):
    """Normalisation across `size` neighbouring channels (Krizhevsky et al. 2012, 3.3). Defaults are MXNet's."""

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    offset: float = 2.0

    def __post_init__(self) -> None:
        self._require(self.size > 0 and self.size % 2 == 1, f"size must be odd and positive, is {self.size}")

    def output_shape(self, shape: Shape) -> Shape:
        return _image(self, shape)


@dataclass(frozen=True)
class Chain(Layer):
    """Layers in sequence; without layers it is the identity. Make it with `chain(...)`."""

    layers: tuple[Layer, ...] = ()

    def output_shape(self, shape: Shape) -> Shape:
        for layer in self.layers:
            shape = layer.output_shape(shape)
        return shape

    def trace(self, shape: Shape) -> Iterator[Step]:
        for layer in self.layers:
            yield from layer.trace(shape)
            shape = layer.output_shape(shape)


@dataclass(frozen=True)
class Join(Layer):
    """Base of Concat and Add: every branch gets the same input."""

    branches: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        self._require(len(self.branches) >= 2, f"needs at least two branches, has {len(self.branches)}")

    def branch_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return tuple(branch.output_shape(shape) for branch in self.branches)

    def trace(self, shape: Shape) -> Iterator[Step]:
        for branch in self.branches:
            yield from branch.trace(shape)
        yield Step(self, shape, self.output_shape(shape))


@dataclass(frozen=True)
class Concat(Join):
    """Concatenates the branches along axis 1; heights and widths must agree."""

    def output_shape(self, shape: Shape) -> Shape:
        shapes = self.branch_shapes(shape)
        agree = len({one[1:] for one in shapes}) == 1
        self._require(agree, f"branches differ in more than channels: {_texts(shapes)} from input {_text(shape)}")
        return sum(one[0] for one in shapes), *shapes[0][1:]


@dataclass(frozen=True)
class Add(Join):
    """Sum of the branches; all shapes must be equal."""

    def output_shape(self, shape: Shape) -> Shape:
        shapes = self.branch_shapes(shape)
        agree = len(set(shapes)) == 1
        self._require(agree, f"branches have different shapes: {_texts(shapes)} from input {_text(shape)}")
        return shapes[0]


def chain(*layers: Layer) -> Chain:
    return Chain(layers=layers)


def concat(*branches: Layer, name: str = "") -> Concat:
    return Concat(name, branches)


def add(*branches: Layer, name: str = "") -> Add:
    return Add(name, branches)


@dataclass(frozen=True)
class Network:
    """A classifier: `root` maps images of `input_shape` (C, H, W) to `num_classes` logits; the softmax belongs to the
    loss.

    Creating one raises ShapeError if a layer does not fit its input, two arrays have the same name, or the output's
    shape is not (num_classes,).
    """

    name: str
    root: Layer
    input_shape: tuple[int, int, int]
    num_classes: int

    def __post_init__(self) -> None:
        names = Counter(array.name for array in (*self.parameters(), *self.auxiliary()))
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ShapeError(f"network {self.name}: two layers share the parameter name {', '.join(twice)}")
        if self.output_shape != (self.num_classes,):
            expected = f"expected ({self.num_classes},), one logit per class"
            raise ShapeError(f"network {self.name}: output is {_text(self.output_shape)}, {expected}")

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every layer in forward order, with its shapes."""
        return tuple(self.root.trace(self.input_shape))

    @cached_property
    def output_shape(self) -> Shape:
        return self.root.output_shape(self.input_shape)

    def parameters(self) -> list[Parameter]:
        """Learned arrays in forward order."""
        return [array for step in self.steps for array in step.layer.parameters(step.input_shape)]

    def auxiliary(self) -> list[Parameter]:
        """Batch-norm statistics (MXNet's auxiliary states) in forward order."""
        return [array for step in self.steps for array in step.layer.auxiliary(step.input_shape)]

    @cached_property
    def num_parameters(self) -> int:
        """Number of learned values in total."""
        return sum(array.size for array in self.parameters())

    def multiply_adds(self) -> int:
        """Multiply-adds of one image's forward pass; a training step takes about three times as many."""
        return sum(step.layer.multiply_adds(step.input_shape) for step in self.steps)


def _check_window(layer: Conv | Pool) -> None:
    layer._require(min(layer.kernel) > 0, f"kernel must be positive, is {layer.kernel}")
    layer._require(min(layer.stride) > 0, f"stride must be positive, is {layer.stride}")
    layer._require(min(layer.pad) >= 0, f"pad must not be negative, is {layer.pad}")


def _image(layer: Layer, shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise layer.refuse(f"input {_text(shape)} is not an image (channels, height, width)")
    channels, height, width = shape
    return channels, height, width


def _extent(layer: Conv | Pool, shape: Shape, axis: int, up: bool) -> int:
    """Output height (axis 0) or width (axis 1); the fraction of a stride is rounded up or down."""
    room = shape[1 + axis] + 2 * layer.pad[axis] - layer.kernel[axis]
    if room < 0:
        window = f"kernel {_text(layer.kernel)}" + (f" with pad {_text(layer.pad)}" if any(layer.pad) else "")
        raise layer.refuse(f"{window} is larger than the input {_text(shape)}")
    stride = layer.stride[axis]
    return (-(-room // stride) if up else room // stride) + 1


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _texts(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(_text, shapes))
