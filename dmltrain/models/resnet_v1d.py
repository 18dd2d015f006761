"""ResNet-D: resnet-v1b with three 3x3 convolutions in place of the 7x7 one, and an average pooling in shortcuts with a
stride, whose projection then sees all pixels (He et al., "Bag of Tricks for Image Classification with Convolutional
Neural Networks", 2019, section 4). The CIFAR networks have the shortcuts only. Options: resnet_v1b.py.
"""

from __future__ import annotations

from dmltrain.layers import AvgPool, Chain, chain
from dmltrain.models.resnet_v1b import normed_relu, projection, variant


def _stem(channels: int) -> Chain:
    deep = (normed_relu("0a", channels // 2, 3, 2), normed_relu("0b", channels // 2, 3), normed_relu("0c", channels, 3))
    return chain(*(layer for part in deep for layer in part.layers))


def _shortcut(name: str, channels: int, stride: int) -> Chain:
    if stride == 1:
        return projection(name, channels, 1)
    pool = AvgPool(f"{name}_pool", kernel=2, stride=stride, rounding="full", count_padding=False)
    return chain(pool, projection(name, channels, 1))


ARCHITECTURE = variant("resnet-v1d", _stem, _shortcut)
