"""Residual networks of Keras with MXNet, as its published profile on CIFAR-10 builds them
(sandeep-krishnamurthy/keras-mxnet-benchmarks, keras1.2/utils/resnet.py), after He, Zhang, Ren and Sun, "Identity
Mappings in Deep Residual Networks", 2016.

Unlike MXNet's: also images of 32x32 pixels go through a 7x7 convolution and a 3x3 pooling of stride 2; convolutions
have biases; only where the shape changes has a shortcut a 1x1 convolution, of the block's input before its batch norm;
the stride is that of a block's first convolution, which is 1x1 in bottlenecks. Batch norms have epsilon 1e-3 and
momentum 0.99. Only the weights of convolutions decay; Keras' l2(1e-4) is `--wd 0.0002`. Keras generates names; those
here are in the manner of MXNet's.
"""

from __future__ import annotations

from dmltrain.base.errors import UserError
from dmltrain.layers import (
    BatchNorm,
    Chain,
    Conv,
    Dense,
    Flatten,
    GlobalAvgPool,
    Layer,
    MaxPool,
    Network,
    Relu,
    Rule,
    add,
    chain,
)
from dmltrain.models.architecture import Architecture

UNITS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # of each stage
USUAL_DEPTH = 50
STEM = 64  # channels
NO_DECAY = Rule(wd_mult=0.0)


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    depth = USUAL_DEPTH if num_layers is None else num_layers
    if depth not in UNITS:
        raise UserError(f"no keras-resnet of {depth} layers; valid depths: {', '.join(map(str, UNITS))}")
    layers: list[Layer] = [Conv("conv0", STEM, kernel=7, stride=2, pad=3), *_norm_relu("bn0", "relu0")]
    layers.append(MaxPool("pooling0", kernel=3, stride=2))
    channels = STEM
    for stage, count in enumerate(UNITS[depth], 1):
        for unit in range(1, count + 1):
            name, stride = f"stage{stage}_unit{unit}", 2 if stage > 1 and unit == 1 else 1
            after = STEM * 2 ** (stage - 1) * (4 if depth >= 50 else 1)
            body = _body(name, after, stride, bottleneck=depth >= 50, normed=(stage, unit) != (1, 1))
            layers.append(add(_shortcut(name, channels, after, stride), body))
            channels = after
    head = (*_norm_relu("bn1", "relu1"), GlobalAvgPool("pool1"), Flatten())
    root = chain(*layers, *head, Dense("fc1", num_classes, weight_rule=NO_DECAY))
    return Network(f"keras-resnet-{depth}", root, image_shape, num_classes)


def _shortcut(name: str, before: int, after: int, stride: int) -> Layer:
    return chain() if before == after and stride == 1 else Conv(f"{name}_sc", after, stride=stride)


def _body(name: str, channels: int, stride: int, bottleneck: bool, normed: bool) -> Chain:
    """Batch norm, ReLU and convolution, two or three times; the very first block begins with a convolution."""
    inner = channels // 4
    shapes = ((inner, 1), (inner, 3), (channels, 1)) if bottleneck else ((channels, 3), (channels, 3))
    layers: list[Layer] = []
    for number, (count, kernel) in enumerate(shapes, 1):
        if number > 1 or normed:
            layers += _norm_relu(f"{name}_bn{number}", f"{name}_relu{number}")
        conv = Conv(f"{name}_conv{number}", count, kernel=kernel, stride=stride if number == 1 else 1, pad=kernel // 2)
        layers.append(conv)
    return chain(*layers)


def _norm_relu(norm: str, relu: str) -> tuple[Layer, Layer]:
    return BatchNorm(norm, epsilon=1e-3, momentum=0.99, fixed_scale=False, gamma_rule=NO_DECAY), Relu(relu)


ARCHITECTURE = Architecture(build, image_shape=(3, 32, 32), num_classes=10, depths="50, also 18, 34, 101 and 152")
