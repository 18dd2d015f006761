"""Residual networks with pre-activation, as MXNet builds them (example/image-classification/symbols/resnet.py), after
He, Zhang, Ren and Sun, "Identity Mappings in Deep Residual Networks", 2016.

Images up to 32 pixels high get a CIFAR network with three stages, larger ones an ImageNet network with four stages
after a 7x7 stem. (MXNet's limit is 28 pixels; it gives 32x32 images an ImageNet network without the stem.) As in MXNet,
the first unit of every stage has a 1x1 convolution on its shortcut even if the shapes agree, and a batch norm with
fixed scale comes first.
"""

from __future__ import annotations

from dmltrain.errors import UserError
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
    add,
    chain,
)

SMALL_IMAGE = 32  # pixels of height, the most for a CIFAR network
CIFAR_DEPTHS = (20, 32, 44, 50, 56, 110, 164)  # the usual ones
IMAGENET_UNITS = {  # depth -> units per stage
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
    269: (3, 30, 48, 8),
}


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    """`num_layers` None means MXNet's default: 110 for CIFAR, 50 for ImageNet. Raises UserError for invalid depths."""
    small = image_shape[1] <= SMALL_IMAGE
    depth = num_layers if num_layers is not None else 110 if small else 50
    units, channels, bottleneck = _cifar(depth) if small else _imagenet(depth)
    stages = [
        _unit(f"stage{stage}_unit{unit}", channels[stage], 2 if stage > 1 and unit == 1 else 1, bottleneck, unit == 1)
        for stage, count in enumerate(units, 1)
        for unit in range(1, count + 1)
    ]
    stem = _conv("conv0", channels[0], 3) if small else _imagenet_stem(channels[0])
    head = (*_norm_relu("bn1", "relu1"), GlobalAvgPool("pool1"), Flatten(), Dense("fc1", num_classes))
    root = chain(BatchNorm("bn_data", epsilon=2e-5, fixed_scale=True), stem, *stages, *head)
    return Network(f"resnet-{depth}", root, image_shape, num_classes)


def _cifar(depth: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """(units per stage, channels of the stem and of each stage, bottleneck units?)"""
    if depth >= 164 and (depth - 2) % 9 == 0:
        return ((depth - 2) // 9,) * 3, (16, 64, 128, 256), True
    if 8 <= depth < 164 and (depth - 2) % 6 == 0:
        return ((depth - 2) // 6,) * 3, (16, 16, 32, 64), False
    usual = ", ".join(map(str, CIFAR_DEPTHS))
    valid = f"{usual} (also any other 6 n + 2 from 8 to 158 and any 9 n + 2 from 164)"
    raise UserError(f"no resnet of {depth} layers for images up to {SMALL_IMAGE} pixels high; valid depths: {valid}")


def _imagenet(depth: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    if depth not in IMAGENET_UNITS:
        valid = ", ".join(map(str, IMAGENET_UNITS))
        raise UserError(f"no resnet of {depth} layers for images over {SMALL_IMAGE} pixels high; valid depths: {valid}")
    bottleneck = depth >= 50
    return IMAGENET_UNITS[depth], (64, 256, 512, 1024, 2048) if bottleneck else (64, 64, 128, 256, 512), bottleneck


def _imagenet_stem(channels: int) -> Chain:
    conv = Conv("conv0", channels, kernel=7, stride=2, pad=3, bias=False)
    return chain(conv, *_norm_relu("bn0", "relu0"), MaxPool("pooling0", kernel=3, stride=2, pad=1))


def _unit(name: str, channels: int, stride: int, bottleneck: bool, project: bool) -> Layer:
    """One residual unit; its shortcut is the input, or with `project` a 1x1 convolution after the first ReLU."""
    enter = _norm_relu(f"{name}_bn1", f"{name}_relu1")
    body = _bottleneck_body(name, channels, stride) if bottleneck else _basic_body(name, channels, stride)
    if project:
        return chain(*enter, add(chain(*body), _conv(f"{name}_sc", channels, 1, stride)))
    return add(chain(*enter, *body), chain())


def _basic_body(name: str, channels: int, stride: int) -> tuple[Layer, ...]:
    return (
        _conv(f"{name}_conv1", channels, 3, stride),
        *_norm_relu(f"{name}_bn2", f"{name}_relu2"),
        _conv(f"{name}_conv2", channels, 3),
    )


def _bottleneck_body(name: str, channels: int, stride: int) -> tuple[Layer, ...]:
    return (
        _conv(f"{name}_conv1", channels // 4, 1),
        *_norm_relu(f"{name}_bn2", f"{name}_relu2"),
        _conv(f"{name}_conv2", channels // 4, 3, stride),
        *_norm_relu(f"{name}_bn3", f"{name}_relu3"),
        _conv(f"{name}_conv3", channels, 1),
    )


def _norm_relu(norm: str, relu: str) -> tuple[Layer, Layer]:
    return BatchNorm(norm, epsilon=2e-5, momentum=0.9, fixed_scale=False), Relu(relu)


def _conv(name: str, channels: int, kernel: int, stride: int = 1) -> Conv:
    return Conv(name, channels, kernel=kernel, stride=stride, pad=kernel // 2, bias=False)
