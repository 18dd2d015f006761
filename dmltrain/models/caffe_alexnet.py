"""Caffe's AlexNet (BVLC's models/bvlc_alexnet/train_val.prototxt), after Krizhevsky, Sutskever and Hinton, "ImageNet
Classification with Deep Convolutional Neural Networks", 2012.

It has the paper's grouped convolutions and 60,965,224 parameters. Local response normalisation comes before the
pooling. Caffe crops 227x227 pixels; 224x224 end in the same 6x6, because Caffe's poolings round up. Weights are normal
of deviation 0.01 or 0.005, and biases 0 or 0.1, at first; biases learn at twice the rate and do not decay.
"""

from __future__ import annotations

from dmltrain.layers import Conv, Dense, Dropout, Flatten, Layer, MaxPool, Network, Normal, Relu, Rule, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.caffe import bias, response_norm


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    root = chain(
        Conv("conv1", 96, kernel=11, stride=4, bias_rule=bias(0.0)),
        *_normalised(1),
        Conv("conv2", 256, kernel=5, pad=2, groups=2, bias_rule=bias(0.1)),
        *_normalised(2),
        Conv("conv3", 384, kernel=3, pad=1, bias_rule=bias(0.0)),
        Relu("relu3"),
        Conv("conv4", 384, kernel=3, pad=1, groups=2, bias_rule=bias(0.1)),
        Relu("relu4"),
        Conv("conv5", 256, kernel=3, pad=1, groups=2, bias_rule=bias(0.1)),
        Relu("relu5"),
        _pool(5),
        Flatten(),
        *_hidden(6),
        *_hidden(7),
        Dense("fc8", num_classes, bias_rule=bias(0.0)),
    )
    return Network("caffe-alexnet", root, image_shape, num_classes, Normal(0.01))


def _normalised(number: int) -> tuple[Layer, ...]:
    return Relu(f"relu{number}"), response_norm(f"norm{number}"), _pool(number)


def _pool(number: int) -> MaxPool:
    return MaxPool(f"pool{number}", kernel=3, stride=2, rounding="full")


def _hidden(number: int) -> tuple[Layer, ...]:
    dense = Dense(f"fc{number}", 4096, weight_rule=Rule(Normal(0.005)), bias_rule=bias(0.1))
    return dense, Relu(f"relu{number}"), Dropout(f"drop{number}", rate=0.5)


ARCHITECTURE = Architecture(build, image_shape=(3, 227, 227), num_classes=1000)
