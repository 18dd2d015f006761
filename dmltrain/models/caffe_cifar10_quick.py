"""Caffe's small network for CIFAR-10 (BVLC's examples/cifar10/cifar10_quick_train_test.prototxt), after Krizhevsky's
cuda-convnet; about 75 % accurate after 5,000 steps there.

It has 145,578 parameters. The first pooling comes before its ReLU, and all poolings round up: 32, 16, 8 and 4 pixels.
Weights are normal of deviation 0.0001, 0.01 or 0.1 at first, made for pixels of 0 to 255 minus the mean image
(`--mean-img`, `--rgb-std 1,1,1`). Biases learn at twice the rate and decay, unlike those of Caffe's other networks.
"""

from __future__ import annotations

from dmltrain.layers import AvgPool, Conv, Dense, Flatten, MaxPool, Network, Normal, Relu, Rule, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.caffe import bias

BIAS = bias(0.0, wd_mult=1.0)


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        _conv(1, 32, 0.0001),
        MaxPool("pool1", kernel=3, stride=2, rounding="full"),
        Relu("relu1"),
        _conv(2, 32, 0.01),
        Relu("relu2"),
        _mean(2),
        _conv(3, 64, 0.01),
        Relu("relu3"),
        _mean(3),
        Flatten(),
        _dense(1, 64),
        _dense(2, num_classes),
    )
    return Network("caffe-cifar10-quick", root, image_shape, num_classes)


def _conv(number: int, channels: int, deviation: float) -> Conv:
    weight = Rule(Normal(deviation))
    return Conv(f"conv{number}", channels, kernel=5, pad=2, weight_rule=weight, bias_rule=BIAS)


def _mean(number: int) -> AvgPool:
    return AvgPool(f"pool{number}", kernel=3, stride=2, rounding="full")


def _dense(number: int, features: int) -> Dense:
    return Dense(f"ip{number}", features, weight_rule=Rule(Normal(0.1)), bias_rule=BIAS)


ARCHITECTURE = Architecture(build, image_shape=(3, 32, 32), num_classes=10)
