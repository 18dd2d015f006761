"""The batch-normalised Inception, as MXNet builds it (example/image-classification/symbols/inception-bn.py), after
Ioffe and Szegedy, "Batch Normalization", 2015.

Images up to 28 pixels high get a simpler network. It is that of inception-bn-28-small except for its batch norms, which
learn a scale and have MXNet 1.9's epsilon, and for the downsampling, which rounds down after padding. Both networks end
with a pooling over 7x7 pixels that is not global: images of 224 and 28 pixels leave one pixel, larger ones more.
Convolutions have biases, which the batch norms after them undo.
"""

from __future__ import annotations

from dmltrain.layers import (
    AvgPool,
    BatchNorm,
    Chain,
    Concat,
    Conv,
    Dense,
    Flatten,
    Layer,
    MaxPool,
    Network,
    Pool,
    Relu,
    chain,
    concat,
)
from dmltrain.models.architecture import Architecture
from dmltrain.models.inception_bn_28_small import BLOCKS

SMALL_IMAGE = 28  # pixels of height, the most for the simpler network
NAMES = ("in3a", "in3b", "in3c", "in4a", "in4b", "in4c", "in4d", "in4e", "in5a", "in5b")  # of the BLOCKS


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    small = image_shape[1] <= SMALL_IMAGE
    head = (AvgPool("global_pool", kernel=7), Flatten("flatten"), Dense("fullyconnected0", num_classes))
    root = chain(*(_small_body() if small else _body()), *head)
    return Network("inception-bn-28" if small else "inception-bn", root, image_shape, num_classes)


def _body() -> tuple[Layer, ...]:
    return (
        _unit("1", 64, kernel=7, stride=2),
        MaxPool("pool_1", kernel=3, stride=2),
        _unit("2_red", 64),
        _unit("2", 192, kernel=3),
        MaxPool("pool_2", kernel=3, stride=2),
        _inception("3a", 64, (64, 64), (64, 96), 32),
        _inception("3b", 64, (64, 96), (64, 96), 64),
        _downsampling("3c", (128, 160), (64, 96)),
        _inception("4a", 224, (64, 96), (96, 128), 128),
        _inception("4b", 192, (96, 128), (96, 128), 128),
        _inception("4c", 160, (128, 160), (128, 160), 128),
        _inception("4d", 96, (128, 192), (160, 192), 128),
        _downsampling("4e", (128, 192), (192, 256)),
        _inception("5a", 352, (192, 320), (160, 224), 128),
        _inception("5b", 352, (192, 320), (192, 224), 128, MaxPool),
    )


def _small_body() -> tuple[Layer, ...]:
    return _unit("1", 96, kernel=3), *map(_small_block, NAMES, BLOCKS)


def _unit(name: str, channels: int, kernel: int = 1, stride: int = 1) -> Chain:
    """Convolution, batch norm, ReLU; stride 1 keeps height and width."""
    conv = Conv(f"conv_{name}", channels, kernel=kernel, stride=stride, pad=kernel // 2)
    norm = BatchNorm(f"bn_{name}", epsilon=1e-5 + 1e-10, momentum=0.9, fixed_scale=False)
    return chain(conv, norm, Relu(f"relu_{name}"))


def _inception(
    name: str, one: int, three: tuple[int, int], double: tuple[int, int], projection: int, pool: type[Pool] = AvgPool
) -> Concat:
    """`three` and `double`: channels of the 1x1 reduction, and of the one or two 3x3 convolutions after it."""
    return concat(
        _unit(f"{name}_1x1", one),
        *_towers(name, three, double, stride=1),
        chain(pool(kernel=3, stride=1, pad=1), _unit(f"{name}_proj", projection)),
    )


def _downsampling(name: str, three: tuple[int, int], double: tuple[int, int]) -> Concat:
    return concat(*_towers(name, three, double, stride=2), MaxPool(kernel=3, stride=2, pad=1))


def _towers(name: str, three: tuple[int, int], double: tuple[int, int], stride: int) -> tuple[Chain, Chain]:
    return (
        chain(_unit(f"{name}_3x3_reduce", three[0]), _unit(f"{name}_3x3", three[1], 3, stride)),
        chain(
            _unit(f"{name}_double_3x3_reduce", double[0]),
            _unit(f"{name}_double_3x3_0", double[1], 3),
            _unit(f"{name}_double_3x3_1", double[1], 3, stride),
        ),
    )


def _small_block(name: str, channels: tuple[int, ...]) -> Concat:
    if len(channels) == 1:
        return concat(_unit(f"{name}_conv", channels[0], 3, 2), MaxPool(f"{name}_pool", kernel=3, stride=2, pad=1))
    return concat(_unit(f"{name}_1x1", channels[0]), _unit(f"{name}_3x3", channels[1], 3))


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
