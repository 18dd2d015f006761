"""Residual networks with the ReLU after the addition, as MXNet builds them
(example/image-classification/symbols/resnet-v1.py), after He, Zhang, Ren and Sun, "Deep Residual Learning for Image
Recognition", 2015.

Two things are MXNet's own. The first unit of every stage has a 1x1 convolution with batch norm on its shortcut even if
the shapes agree, and the CIFAR networks have no ReLU after their first batch norm. A bottleneck unit has its stride in
the first convolution, as in the paper. Depths and sizes: residual.py.
"""

from __future__ import annotations

from dmltrain.layers import Dense, Flatten, GlobalAvgPool, Layer, Network, Relu, add, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.residual import DEPTHS, conv, imagenet_stem, norm, normed, plan


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, zero_gamma: bool = False
) -> Network:
    shape = plan("resnet-v1", num_layers, image_shape)

    def unit(name: str, channels: int, stride: int, first: bool) -> Layer:
        inner = channels // 4
        deep, basic = ((inner, 1, stride), (inner, 3), (channels, 1)), ((channels, 3, stride), (channels, 3))
        body = normed(name, *(deep if shape.bottleneck else basic), zero_gamma=zero_gamma)
        projection = (conv(f"{name}_conv1sc", channels, 1, stride), norm(f"{name}_sc")) if first else ()
        return chain(add(body, chain(*projection)), Relu(f"{name}_relu3"))

    small = chain(conv("conv0", shape.channels[0], 3), norm("bn0"))
    stem = small if shape.small else imagenet_stem(shape.channels[0])
    head = (GlobalAvgPool("pool1"), Flatten(), Dense("fc1", num_classes))
    root = chain(stem, *shape.stages(unit), *head)
    return Network(f"resnet-v1-{shape.depth}", root, image_shape, num_classes)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000, depths=DEPTHS)
