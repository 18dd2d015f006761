"""LeNet with tanh and max pooling, as MXNet builds it (example/image-classification/symbols/lenet.py), after
LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 1998.

MXNet's file does not name the layers; the names here are those that MXNet generates in a new process.
"""

from __future__ import annotations

from dmltrain.layers import Conv, Dense, Flatten, MaxPool, Network, Tanh, chain
from dmltrain.models.architecture import Architecture
from dmltrain.models.depth import refuse_depth


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    refuse_depth("lenet", num_layers)
    root = chain(
        Conv("convolution0", 20, kernel=5),
        Tanh("activation0"),
        MaxPool("pooling0", kernel=2, stride=2),
        Conv("convolution1", 50, kernel=5),
        Tanh("activation1"),
        MaxPool("pooling1", kernel=2, stride=2),
        Flatten(),
        Dense("fullyconnected0", 500),
        Tanh("activation2"),
        Dense("fullyconnected1", num_classes),
    )
    return Network("lenet", root, image_shape, num_classes)


ARCHITECTURE = Architecture(build, image_shape=(1, 28, 28), num_classes=10)
