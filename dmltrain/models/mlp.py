"""A multilayer perceptron with 128 and 64 hidden units (MXNet example/image-classification/symbols/mlp.py)."""

from __future__ import annotations

from dmltrain.layers import Dense, Flatten, Network, Relu, chain
from dmltrain.models.architecture import Architecture


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        Flatten(),
        Dense("fc1", 128),
        Relu("relu1"),
        Dense("fc2", 64),
        Relu("relu2"),
        Dense("fc3", num_classes),
    )
    return Network("mlp", root, image_shape, num_classes)


ARCHITECTURE = Architecture(build, image_shape=(1, 28, 28), num_classes=10)
