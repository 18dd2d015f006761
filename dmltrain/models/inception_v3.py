"""Inception-v3 without its auxiliary classifier, as MXNet builds it
(example/image-classification/symbols/inception-v3.py), after Szegedy et al., "Rethinking the Inception Architecture for
Computer Vision", 2015.

The last pooling is over 8x8 pixels and not global: images of 299 pixels leave one pixel, larger ones more. Batch norms
have a fixed scale.
"""

from __future__ import annotations

from dmltrain.layers import AvgPool, Concat, Dense, Flatten, Layer, MaxPool, Network, Pool, chain, concat
from dmltrain.models.architecture import Architecture
from dmltrain.models.inception_unit import pooled, same, valid


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        *_stem(),
        _five("mixed", 32),
        _five("mixed_1", 64),
        _five("mixed_2", 64),
        _five_to_seven("mixed_3"),
        _seven("mixed_4", 128),
        _seven("mixed_5", 160),
        _seven("mixed_6", 160),
        _seven("mixed_7", 192),
        _seven_to_three("mixed_8"),
        _three("mixed_9", AvgPool),
        _three("mixed_10", MaxPool),
        AvgPool("global_pool", kernel=8),
        Flatten("flatten"),
        Dense("fc1", num_classes),
    )
    return Network("inception-v3", root, image_shape, num_classes)


def _stem() -> tuple[Layer, ...]:
    return (
        valid("conv", 32, 3, stride=2),
        valid("conv_1", 32, 3),
        same("conv_2", 64, 3),
        MaxPool("pool", kernel=3, stride=2),
        same("conv_3", 80),
        valid("conv_4", 192, 3),
        MaxPool("pool1", kernel=3, stride=2),
    )


def _five(name: str, projection: int) -> Concat:
    """A 5x5 convolution beside two of 3x3, at 35x35 pixels."""
    return concat(
        same(f"{name}_conv", 64),
        chain(same(f"{name}_tower_conv", 48), same(f"{name}_tower_conv_1", 64, 5)),
        chain(
            same(f"{name}_tower_1_conv", 64),
            same(f"{name}_tower_1_conv_1", 96, 3),
            same(f"{name}_tower_1_conv_2", 96, 3),
        ),
        pooled(AvgPool, f"{name}_tower_2_conv", projection),
    )


def _five_to_seven(name: str) -> Concat:
    """35x35 pixels to 17x17."""
    return concat(
        valid(f"{name}_conv", 384, 3, stride=2),
        chain(
            same(f"{name}_tower_conv", 64),
            same(f"{name}_tower_conv_1", 96, 3),
            valid(f"{name}_tower_conv_2", 96, 3, stride=2),
        ),
        MaxPool(kernel=3, stride=2),
    )


def _seven(name: str, inner: int) -> Concat:
    """7x7 convolutions as 1x7 and 7x1, at 17x17 pixels."""
    return concat(
        same(f"{name}_conv", 192),
        chain(
            same(f"{name}_tower_conv", inner),
            same(f"{name}_tower_conv_1", inner, (1, 7)),
            same(f"{name}_tower_conv_2", 192, (7, 1)),
        ),
        chain(
            same(f"{name}_tower_1_conv", inner),
            same(f"{name}_tower_1_conv_1", inner, (7, 1)),
            same(f"{name}_tower_1_conv_2", inner, (1, 7)),
            same(f"{name}_tower_1_conv_3", inner, (7, 1)),
            same(f"{name}_tower_1_conv_4", 192, (1, 7)),
        ),
        pooled(AvgPool, f"{name}_tower_2_conv", 192),
    )


def _seven_to_three(name: str) -> Concat:
    """17x17 pixels to 8x8."""
    return concat(
        chain(same(f"{name}_tower_conv", 192), valid(f"{name}_tower_conv_1", 320, 3, stride=2)),
        chain(
            same(f"{name}_tower_1_conv", 192),
            same(f"{name}_tower_1_conv_1", 192, (1, 7)),
            same(f"{name}_tower_1_conv_2", 192, (7, 1)),
            valid(f"{name}_tower_1_conv_3", 192, 3, stride=2),
        ),
        MaxPool(kernel=3, stride=2),
    )


def _three(name: str, pool: type[Pool]) -> Concat:
    """1x3 and 3x1 convolutions side by side, at 8x8 pixels."""
    return concat(
        same(f"{name}_conv", 320),
        chain(same(f"{name}_tower_conv", 384), _split(f"{name}_tower_mixed_conv")),
        chain(
            same(f"{name}_tower_1_conv", 448),
            same(f"{name}_tower_1_conv_1", 384, 3),
            _split(f"{name}_tower_1_mixed_conv"),
        ),
        pooled(pool, f"{name}_tower_2_conv", 192),
    )


def _split(name: str) -> Concat:
    return concat(same(name, 384, (1, 3)), same(f"{name}_1", 384, (3, 1)))


ARCHITECTURE = Architecture(build, image_shape=(3, 299, 299), num_classes=1000)
