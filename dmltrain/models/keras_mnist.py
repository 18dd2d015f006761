"""Keras' convolutional network for MNIST (examples/mnist_cnn.py), with ReLU and dropout; 99.25 % after 12 epochs there.

It is that of Keras 2; in Keras 1 the second convolution has 32 channels, too. Weights start uniform by Xavier's rule
(glorot_uniform). Its authors train it with batches of 128, `--optimizer adadelta --wd 0`.
"""

from __future__ import annotations

from dmltrain.layers import Conv, Dense, Dropout, Flatten, MaxPool, Network, Relu, Xavier, chain
from dmltrain.models.architecture import Architecture


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        Conv("conv1", 32, kernel=3),
        Relu("relu1"),
        Conv("conv2", 64, kernel=3),
        Relu("relu2"),
        MaxPool("pool", kernel=2, stride=2),
        Dropout("drop1", rate=0.25),
        Flatten(),
        Dense("fc1", 128),
        Relu("relu3"),
        Dropout("drop2", rate=0.5),
        Dense("fc2", num_classes),
    )
    return Network("keras-mnist", root, image_shape, num_classes, Xavier())


ARCHITECTURE = Architecture(build, image_shape=(1, 28, 28), num_classes=10)
