"""ResNet-D: resnet-v1b with three 3x3 convolutions in place of the 7x7 one, and an average pooling in shortcuts with a
stride, whose projection then sees all pixels (He et al., "Bag of Tricks for Image Classification with Convolutional
Neural Networks", 2019, section 4). The CIFAR networks have the shortcuts only. Options: resnet_v1b.py.
"""

from __future__ import annotations

from dmltrain.layers import AvgPool, Chain, Network, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.residual import DEPTHS, plan
from dmltrain.models.resnet_v1b import Changes, head, normed_relu, projection, stem_of, units
from dmltrain.models.skips import check


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
    shape = plan("resnet-v1d", num_layers, image_shape)
    check("resnet-v1d", stochastic_depth)
    changes = Changes(zero_gamma, squeeze_excitation, stochastic_depth, blur_pool)
    channels = shape.channels[0]
    deep = (normed_relu("0a", channels // 2, 3, 2), normed_relu("0b", channels // 2, 3), normed_relu("0c", channels, 3))
    stem = chain(*(layer for part in deep for layer in part.layers))
    root = chain(stem_of(shape, stem), *units(shape, changes, _shortcut), *head(num_classes))
    return Network(f"resnet-v1d-{shape.depth}", root, image_shape, num_classes)


def _shortcut(name: str, channels: int, stride: int) -> Chain:
    if stride == 1:
        return projection(name, channels, 1)
    pool = AvgPool(f"{name}_pool", kernel=2, stride=stride, rounding="full", count_padding=False)
    return chain(pool, projection(name, channels, 1))


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000, depths=DEPTHS)
