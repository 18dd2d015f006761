"""Residual networks as they are trained today: torchvision's ResNet, whose bottlenecks have the stride in the 3x3
convolution, and shortcuts are projections only where shapes differ.

Its options are changes that later papers made:

* `zero_gamma`: the last gamma of each unit starts as 0 (Goyal et al., "Accurate, Large Minibatch SGD", 2017, 5.1).
* `squeeze_excitation`: at the end of each unit's branch, with a sixteenth of its channels (Hu et al. 2018).
* `stochastic_depth`: the probability to skip the last unit; unit l of L is skipped with l / L of it (Huang et al.,
  "Deep Networks with Stochastic Depth", 2016, section 3).
* `blur_pool`: a blur of 3x3 pixels (1, 2, 1) before convolutions with a stride (Zhang, "Making Convolutional Networks
  Shift-Invariant Again", 2019), where FFCV's programs have it: not in the stem.

Depths and sizes: residual.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from dmltrain.layers import (
    AvgPool,
    Chain,
    Conv,
    Dense,
    Flatten,
    GlobalAvgPool,
    Layer,
    MaxPool,
    Network,
    Relu,
    add,
    chain,
)
from dmltrain.models.architecture import Architecture
from dmltrain.models.residual import DEPTHS, ResidualPlan, conv, norm, normed, plan
from dmltrain.models.skips import check, skipped
from dmltrain.models.squeeze import squeeze

EPSILON = 1e-5  # torchvision's
REDUCTION = 16  # of squeeze-and-excitation
BLUR = (AvgPool(kernel=2, pad=1), AvgPool(kernel=2))  # (1, 1) twice, in both directions: (1, 2, 1) with zeros around


@dataclass(frozen=True)
class Changes:
    """The options of this network: see the module."""

    zero_gamma: bool = False
    squeeze_excitation: bool = False
    stochastic_depth: float = 0.0
    blur_pool: bool = False


def variant(name: str, stem: Callable[[int], Chain], project: Callable[[str, int, int], Chain]) -> Architecture:
    """A network with these options. `stem(channels)`: its first layers on large images, without the pooling;
    `project(name, channels, stride)`: the shortcut of a unit whose shape differs from that of its input."""

    def build(
        num_layers: int | None,
        num_classes: int,
        image_shape: tuple[int, int, int],
        *,
        zero_gamma: bool = False,
        squeeze_excitation: bool = False,
        stochastic_depth: float = 0.0,
        blur_pool: bool = False,
    ) -> Network:
        """Raises UserError for invalid depths and probabilities."""
        shape = plan(name, num_layers, image_shape)
        check(name, stochastic_depth)
        changes = Changes(zero_gamma, squeeze_excitation, stochastic_depth, blur_pool)
        head = GlobalAvgPool("pool1"), Flatten(), Dense("fc1", num_classes)
        root = chain(_stem(shape, stem), *_units(shape, changes, project), *head)
        return Network(f"{name}-{shape.depth}", root, image_shape, num_classes)

    return Architecture(build, image_shape=(3, 224, 224), num_classes=1000, depths=DEPTHS)


def _stem(shape: ResidualPlan, large: Callable[[int], Chain]) -> Chain:
    """3x3 for a CIFAR network, else the layers `large` and 3x3 pooling with stride 2."""
    channels = shape.channels[0]
    if shape.small:
        return normed_relu("0", channels, 3)
    return chain(large(channels), MaxPool("pooling0", kernel=3, stride=2, pad=1))


def normed_relu(number: str, channels: int, kernel: int, stride: int = 1) -> Chain:
    """Convolution, batch norm and ReLU of a stem."""
    convolution = conv(f"conv{number}", channels, kernel, stride)
    return chain(convolution, norm(f"bn{number}", epsilon=EPSILON), Relu(f"relu{number}"))


def _units(shape: ResidualPlan, changes: Changes, project: Callable[[str, int, int], Chain]) -> list[Layer]:
    numbers = count(1)

    def unit(name: str, channels: int, stride: int, first: bool) -> Layer:
        rate = changes.stochastic_depth * next(numbers) / sum(shape.units)
        differs = first and (stride > 1 or channels != shape.channels[0])
        body = skipped(name, rate, _body(name, channels, stride, shape.bottleneck, changes))
        shortcut = project(name, channels, stride) if differs else chain()
        if changes.blur_pool:
            shortcut = blurred(shortcut)
        return chain(add(body, shortcut), Relu(f"{name}_relu3"))

    return shape.stages(unit)


def _body(name: str, channels: int, stride: int, bottleneck: bool, changes: Changes) -> Chain:
    inner = channels // 4
    deep, basic = ((inner, 1), (inner, 3, stride), (channels, 1)), ((channels, 3, stride), (channels, 3))
    body = normed(name, *(deep if bottleneck else basic), zero_gamma=changes.zero_gamma, epsilon=EPSILON)
    if changes.blur_pool:
        body = blurred(body)
    if changes.squeeze_excitation:
        body = chain(body, squeeze(name, channels, channels // REDUCTION, Relu(f"{name}_se_relu")))
    return body


def projection(name: str, channels: int, stride: int) -> Chain:
    return chain(conv(f"{name}_conv1sc", channels, 1, stride), norm(f"{name}_sc", epsilon=EPSILON))


def blurred(body: Chain) -> Chain:
    """The same layers, with a blur before each convolution that has a stride."""
    strided = [isinstance(layer, Conv) and max(layer.stride) > 1 for layer in body.layers]
    pairs = zip(body.layers, strided, strict=True)
    return chain(*(part for layer, blurs in pairs for part in ((*BLUR, layer) if blurs else (layer,))))


ARCHITECTURE = variant("resnet-v1b", lambda channels: normed_relu("0", channels, 7, 2), projection)
