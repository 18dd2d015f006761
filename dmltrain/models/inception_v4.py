"""Inception-v4, as MXNet builds it (example/image-classification/symbols/inception-v4.py), after Szegedy, Ioffe and
Vanhoucke, "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning", 2016.

It has 55.0 million parameters instead of the paper's 42.7 million: MXNet's last pooling is not global but over 8x8
pixels with padding and stride 1, which leaves 3x3 pixels of 1,536 channels to the dense layer, 12.3 million weights
more. Batch norms have a fixed scale. The asterisks in the names of arrays are MXNet's.
"""

from __future__ import annotations

from dmltrain.layers import AvgPool, Chain, Concat, Dense, Dropout, Flatten, MaxPool, Network, chain, concat
from dmltrain.models.architecture import Architecture
from dmltrain.models.inception_unit import pooled, same, valid


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        _stem("in_stem"),
        *(_a(f"in{number}A") for number in range(1, 5)),
        _reduction_a("re1A"),
        *(_b(f"in{number}B") for number in range(1, 8)),
        _reduction_b("re1B"),
        *(_c(f"in{number}C") for number in range(1, 4)),
        AvgPool("global_avgpool", kernel=8, pad=1),
        Dropout(rate=0.2),
        Flatten("flatten"),
        Dense("fc1", num_classes),
    )
    return Network("inception-v4", root, image_shape, num_classes)


def _stem(name: str) -> Chain:
    return chain(
        valid(f"{name}_conv1_3*3", 32, 3, stride=2),
        valid(f"{name}_conv2_3*3", 32, 3),
        same(f"{name}_conv3_3*3", 64, 3),
        concat(MaxPool(kernel=3, stride=2), valid(f"{name}_conv4_3*3", 96, 3, stride=2)),
        concat(
            chain(same(f"{name}_conv5_1*1", 64), valid(f"{name}_conv6_3*3", 96, 3)),
            chain(
                same(f"{name}_conv7_1*1", 64),
                same(f"{name}_conv8_7*1", 64, (7, 1)),
                same(f"{name}_conv9_1*7", 64, (1, 7)),
                valid(f"{name}_conv10_3*3", 96, 3),
            ),
        ),
        concat(valid(f"{name}_conv11_3*3", 192, 3, stride=2), MaxPool(kernel=3, stride=2)),
    )


def _a(name: str) -> Concat:
    return concat(
        pooled(AvgPool, f"{name}_conv1_1*1", 96),
        same(f"{name}_conv2_1*1", 96),
        chain(same(f"{name}_conv3_1*1", 64), same(f"{name}_conv4_3*3", 96, 3)),
        chain(same(f"{name}_conv5_1*1", 64), same(f"{name}_conv6_3*3", 96, 3), same(f"{name}_conv7_3*3", 96, 3)),
    )


def _reduction_a(name: str) -> Concat:
    return concat(
        MaxPool(kernel=3, stride=2),
        valid(f"{name}_conv1_3*3", 384, 3, stride=2),
        chain(
            same(f"{name}_conv2_1*1", 192),
            same(f"{name}_conv3_3*3", 224, 3),
            valid(f"{name}_conv4_3*3", 256, 3, stride=2),
        ),
    )


def _b(name: str) -> Concat:
    return concat(
        pooled(AvgPool, f"{name}_conv1_1*1", 128),
        same(f"{name}_conv2_1*1", 384),
        chain(
            same(f"{name}_conv3_1*1", 192),
            same(f"{name}_conv4_1*7", 224, (1, 7)),
            same(f"{name}_conv5_1*7", 256, (7, 1)),
        ),
        chain(
            same(f"{name}_conv6_1*1", 192),
            same(f"{name}_conv7_1*7", 192, (1, 7)),
            same(f"{name}_conv8_7*1", 224, (7, 1)),
            same(f"{name}_conv9_1*7", 224, (1, 7)),
            same(f"{name}_conv10_7*1", 256, (7, 1)),
        ),
    )


def _reduction_b(name: str) -> Concat:
    return concat(
        MaxPool(kernel=3, stride=2),
        chain(same(f"{name}_conv1_1*1", 192), valid(f"{name}_conv2_3*3", 192, 3, stride=2)),
        chain(
            same(f"{name}_conv3_1*1", 256),
            same(f"{name}_conv4_1*7", 256, (1, 7)),
            same(f"{name}_conv5_7*1", 320, (7, 1)),
            valid(f"{name}_conv6_3*3", 320, 3, stride=2),
        ),
    )


def _c(name: str) -> Concat:
    return concat(
        pooled(AvgPool, f"{name}_conv1_1*1", 256),
        same(f"{name}_conv2_1*1", 256),
        chain(
            same(f"{name}_conv3_1*1", 384),
            concat(same(f"{name}_conv4_3*1", 256, (1, 3)), same(f"{name}_conv5_1*3", 256, (3, 1))),
        ),
        chain(
            same(f"{name}_conv6_1*1", 384),
            same(f"{name}_conv7_1*3", 448, (1, 3)),
            same(f"{name}_conv8_3*1", 512, (3, 1)),
            concat(same(f"{name}_conv9_1*3", 256, (3, 1)), same(f"{name}_conv10_3*1", 256, (1, 3))),
        ),
    )


ARCHITECTURE = Architecture(build, image_shape=(3, 299, 299), num_classes=1000)
