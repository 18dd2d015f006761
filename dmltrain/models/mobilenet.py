"""MobileNet, as MXNet builds it (example/image-classification/symbols/mobilenet.py), after Howard et al., "MobileNets:
Efficient Convolutional Neural Networks for Mobile Vision Applications", 2017.

`multiplier` (the paper's alpha) multiplies the numbers of channels. The last pooling covers 1/32 of the image, whose
height and width must be multiples of 32. MXNet's batch norms have no scale, so that there are 4,231,976 parameters with
MXNet's constant gammas, and 4,221,032 without them.
"""

from __future__ import annotations

from dmltrain.base.errors import UserError
from dmltrain.layers import MXNET_EPSILON, AvgPool, BatchNorm, Conv, Dense, Flatten, Layer, Network, Relu, chain
from dmltrain.models.architecture import Architecture

MULTIPLIERS = (0.25, 0.5, 0.75, 1.0)
STEM = 32  # channels
REDUCTION = 32  # height of the image over that of the last feature maps
# (channels, stride of the depthwise convolution) of each pair of convolutions
PAIRS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, multiplier: float = 1.0
) -> Network:
    _check(multiplier, image_shape)
    channels = int(STEM * multiplier)
    layers = [*_unit("conv_1", channels, kernel=3, stride=2, pad=1)]
    for number, (usual, stride) in enumerate(PAIRS, 2):
        layers += _unit(f"conv_{number}_dw", channels, kernel=3, stride=stride, pad=1, groups=channels)
        channels = int(STEM * multiplier) * usual // STEM
        layers += _unit(f"conv_{number}", channels)
    window = (image_shape[1] // REDUCTION, image_shape[2] // REDUCTION)
    head = (AvgPool("global_pool", kernel=window), Flatten("flatten"), Dense("fc", num_classes))
    return Network("mobilenet", chain(*layers, *head), image_shape, num_classes)


def _check(multiplier: float, image_shape: tuple[int, int, int]) -> None:
    if multiplier not in MULTIPLIERS:
        valid = ", ".join(map(str, MULTIPLIERS))
        raise UserError(f"network mobilenet has no multiplier {multiplier}; valid are {valid}")
    _, height, width = image_shape
    if height % REDUCTION or width % REDUCTION:
        actual = f"found {height}x{width}"
        raise UserError(f"network mobilenet needs images whose height and width are multiples of {REDUCTION}, {actual}")


def _unit(name: str, channels: int, kernel: int = 1, stride: int = 1, pad: int = 0, groups: int = 1) -> list[Layer]:
    conv = Conv(f"{name}_conv2d", channels, kernel=kernel, stride=stride, pad=pad, bias=False, groups=groups)
    return [conv, BatchNorm(f"{name}_batchnorm", epsilon=MXNET_EPSILON), Relu(f"{name}_relu")]


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
