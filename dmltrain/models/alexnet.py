"""AlexNet on one device, as MXNet builds it (example/image-classification/symbols/alexnet.py), after Krizhevsky,
Sutskever and Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012.

It has 50.8 million parameters instead of the paper's 61 million. The convolutions are not grouped (1.4 million more).
The first one is not padded, so that images of 224 pixels, which the paper's sizes take for 227, leave 5x5 instead of
6x6 pixels to the first dense layer (11.5 million fewer). First weights are normal with deviation 0.01, as in MXNet's
programs (common/fit.py).
"""

from __future__ import annotations

from dmltrain.layers import (
    Conv,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool,
    Network,
    Normal,
    Relu,
    chain,
)
from dmltrain.models.architecture import Architecture


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        Conv("conv1", 96, kernel=11, stride=4),
        *_normalised(),
        Conv("conv2", 256, kernel=5, pad=2),
        *_normalised(),
        Conv("conv3", 384, kernel=3, pad=1),
        Relu(),
        Conv("conv4", 384, kernel=3, pad=1),
        Relu(),
        Conv("conv5", 256, kernel=3, pad=1),
        Relu(),
        MaxPool(kernel=3, stride=2),
        Flatten(),
        *_hidden("fc1"),
        *_hidden("fc2"),
        Dense("fc3", num_classes),
    )
    return Network("alexnet", root, image_shape, num_classes, Normal())  # it does not learn from Xavier's


def _normalised() -> tuple[Layer, ...]:
    return Relu(), LocalResponseNorm(size=5, alpha=1e-4, beta=0.75, offset=2.0), MaxPool(kernel=3, stride=2)


def _hidden(name: str) -> tuple[Layer, ...]:
    return Dense(name, 4096), Relu(), Dropout(rate=0.5)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
