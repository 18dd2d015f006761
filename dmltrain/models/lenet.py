"""LeNet with tanh and max pooling, as MXNet builds it (example/image-classification/symbols/lenet.py), after
LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998.

With `add_stn` a spatial transformer comes first (Jaderberg et al. 2015). It starts as the identity and learns with a
hundredth of the learning rate. (The identity is what MXNet's initialisers once gave to layers named stn_loc. MXNet
1.9.1 starts them as any other layer, so that each image starts as a random patch of itself.)

MXNet's file does not name the layers; the names here are those that MXNet generates in a new process.
"""

from __future__ import annotations

from dmltrain.layers import (
    IDENTITY,
    Chain,
    Constant,
    Conv,
    Dense,
    Exactly,
    Flatten,
    GlobalAvgPool,
    Layer,
    MaxPool,
    Network,
    Relu,
    Rule,
    SpatialTransformer,
    Tanh,
    chain,
)
from dmltrain.models.architecture import Architecture

TARGET = 28  # height and width of what the spatial transformer samples
STN_RATE = 0.01  # multiplies the learning rate


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, add_stn: bool = False
) -> Network:
    transformer = (SpatialTransformer("spatialtransformer0", _localisation(), TARGET),) if add_stn else ()
    first = 2 if add_stn else 0  # convolution, activation and pooling; the transformer has two of each
    root = chain(
        *transformer,
        *_stage(first, 20),
        *_stage(first + 1, 50),
        Flatten(),
        Dense("fullyconnected0", 500),
        Tanh(f"activation{first + 2}"),
        Dense("fullyconnected1", num_classes),
    )
    return Network("lenet-stn" if add_stn else "lenet", root, image_shape, num_classes)


def _stage(number: int, channels: int) -> tuple[Layer, ...]:
    conv = Conv(f"convolution{number}", channels, kernel=5)
    return conv, Tanh(f"activation{number}"), MaxPool(f"pooling{number}", kernel=2, stride=2)


def _localisation() -> Chain:
    still = Rule(Constant(0.0), lr_mult=STN_RATE)
    return chain(
        Conv("convolution0", 30, kernel=5, stride=2),
        Relu("activation0"),
        MaxPool("pooling0", kernel=2, stride=2),
        Conv("convolution1", 60, kernel=3, pad=1),
        Relu("activation1"),
        GlobalAvgPool("pooling1"),
        Flatten(),
        Dense("stn_loc", 6, weight_rule=still, bias_rule=Rule(Exactly(IDENTITY), lr_mult=STN_RATE)),
    )


ARCHITECTURE = Architecture(build, image_shape=(1, 28, 28), num_classes=10)
