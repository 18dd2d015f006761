"""VGG networks of 3x3 convolutions, as MXNet builds them (example/image-classification/symbols/vgg.py), after
Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014.

11, 13, 16 and 19 layers are the paper's networks A, B, D and E. With `batch_norm` a batch norm with fixed scale follows
each convolution, which keeps its bias. First weights are uniform by Xavier's rule, as in MXNet's programs
(common/fit.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dmltrain.base.errors import UserError
from dmltrain.layers import (
    MXNET_EPSILON,
    BatchNorm,
    Conv,
    Dense,
    Dropout,
    Flatten,
    Layer,
    MaxPool,
    Network,
    Relu,
    Xavier,
    chain,
)
from dmltrain.models.architecture import Architecture

CHANNELS = (64, 128, 256, 512, 512)
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # of each stage
USUAL_DEPTH = 16


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, batch_norm: bool = False
) -> Network:
    depth = USUAL_DEPTH if num_layers is None else num_layers
    if depth not in CONVOLUTIONS:
        valid = ", ".join(map(str, CONVOLUTIONS))
        raise UserError(f"no vgg of {depth} layers; valid depths: {valid}")
    stages = [
        layer
        for stage, (count, channels) in enumerate(zip(CONVOLUTIONS[depth], CHANNELS, strict=True), 1)
        for layer in _stage(stage, count, channels, batch_norm)
    ]
    head = (*_hidden(6), *_hidden(7), Dense("fc8", num_classes))
    name = f"vgg-{depth}" + ("-bn" if batch_norm else "")
    return Network(name, chain(*stages, Flatten("flatten"), *head), image_shape, num_classes, Xavier())


def _stage(stage: int, count: int, channels: int, batch_norm: bool) -> Iterator[Layer]:
    for number in range(1, count + 1):
        yield Conv(f"conv{stage}_{number}", channels, kernel=3, pad=1)
        if batch_norm:
            yield BatchNorm(f"bn{stage}_{number}", epsilon=MXNET_EPSILON)
        yield Relu(f"relu{stage}_{number}")
    yield MaxPool(f"pool{stage}", kernel=2, stride=2)


def _hidden(number: int) -> tuple[Layer, ...]:
    return Dense(f"fc{number}", 4096), Relu(f"relu{number}"), Dropout(f"drop{number}", rate=0.5)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000, depths="16, also 11, 13 and 19")
