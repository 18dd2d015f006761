"""The simplified batch-normalised Inception for images of about 28 x 28, as MXNet builds it
(example/image-classification/symbol_inception-bn-28-small.py of 2015), after Ioffe and Szegedy 2015, "Batch
Normalization".

Defaults of that file are explicit here: convolutions have biases, batch norm has epsilon 1e-3, momentum
0.9 and a fixed scale, and the pooling of the downsampling blocks rounds up ("full", MXNet's only rounding in 2015;
rounding down, 28 -> 13, would not fit the convolution beside it, 28 -> 14). The last pooling is 7x7 with stride 1, so
28x28 images end in 1x1 and 32x32 images in 2x2. Names are those that MXNet generates in a new process.
"""

from __future__ import annotations

from itertools import count

from dmltrain.layers import (
    AvgPool,
    BatchNorm,
    Chain,
    Concat,
    Conv,
    Dense,
    Flatten,
    MaxPool,
    Network,
    Relu,
    chain,
    concat,
)
from dmltrain.models.architecture import Architecture

# (channels of the 1x1 branch, channels of the 3x3 branch), or (channels,) for a downsampling block
BLOCKS = (
    (32, 32),
    (32, 48),
    (80,),
    (112, 48),
    (96, 64),
    (80, 80),
    (48, 96),
    (96,),
    (176, 160),
    (176, 160),
)


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    number = count()  # of the next convolution and its batch norm
    blocks = [_unit(next(number), 96, kernel=3, pad=1), *(_block(number, channels) for channels in BLOCKS)]
    root = chain(
        *blocks, AvgPool("global_pool", kernel=7, rounding="full"), Flatten("flatten1"), Dense("fc1", num_classes)
    )
    return Network("inception-bn-28-small", root, image_shape, num_classes)


def _unit(number: int, channels: int, kernel: int, stride: int = 1, pad: int = 0) -> Chain:
    """Convolution, batch norm, ReLU."""
    conv = Conv(f"convolution{number}", channels, kernel=kernel, stride=stride, pad=pad)
    return chain(conv, BatchNorm(f"batchnorm{number}"), Relu(f"activation{number}"))


def _block(number: count[int], channels: tuple[int, ...]) -> Concat:
    if len(channels) == 1:  # halves height and width, adds `channels` channels
        return concat(
            _unit(next(number), channels[0], kernel=3, stride=2, pad=1), MaxPool(kernel=3, stride=2, rounding="full")
        )
    return concat(_unit(next(number), channels[0], kernel=1), _unit(next(number), channels[1], kernel=3, pad=1))


ARCHITECTURE = Architecture(build, image_shape=(3, 28, 28), num_classes=10)
