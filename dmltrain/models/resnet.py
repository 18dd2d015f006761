"""Residual networks with pre-activation, as MXNet builds them (example/image-classification/symbols/resnet.py), after
He, Zhang, Ren and Sun, "Identity Mappings in Deep Residual Networks", 2016.

As in MXNet, the first unit of every stage has a 1x1 convolution on its shortcut even if the shapes agree, and a batch
norm with fixed scale comes first. Depths and sizes: residual.py.
"""

from __future__ import annotations

from dmltrain.layers import BatchNorm, Dense, Flatten, GlobalAvgPool, Layer, Network, Relu, add, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.residual import DEPTHS, conv, imagenet_stem, norm, plan


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    """`num_layers` None means MXNet's default: 110 for CIFAR, 50 for ImageNet. Raises UserError for invalid depths."""
    shape = plan("resnet", num_layers, image_shape)

    def unit(name: str, channels: int, stride: int, first: bool) -> Layer:
        return _unit(name, channels, stride, shape.bottleneck, first)

    stem = conv("conv0", shape.channels[0], 3) if shape.small else imagenet_stem(shape.channels[0])
    head = (norm("bn1"), Relu("relu1"), GlobalAvgPool("pool1"), Flatten(), Dense("fc1", num_classes))
    root = chain(BatchNorm("bn_data", epsilon=2e-5, fixed_scale=True), stem, *shape.stages(unit), *head)
    return Network(f"resnet-{shape.depth}", root, image_shape, num_classes)


def _unit(name: str, channels: int, stride: int, bottleneck: bool, project: bool) -> Layer:
    """One residual unit; its shortcut is the input, or with `project` a 1x1 convolution after the first ReLU."""
    inner = channels // 4
    deep, basic = ((inner, 1), (inner, 3, stride), (channels, 1)), ((channels, 3, stride), (channels, 3))
    layers = [
        layer
        for number, convolution in enumerate(deep if bottleneck else basic, 1)
        for layer in (
            norm(f"{name}_bn{number}"),
            Relu(f"{name}_relu{number}"),
            conv(f"{name}_conv{number}", *convolution),
        )
    ]
    enter, body = layers[:2], layers[2:]
    if project:
        return chain(*enter, add(chain(*body), conv(f"{name}_sc", channels, 1, stride)))
    return add(chain(*enter, *body), chain())


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000, depths=DEPTHS)
