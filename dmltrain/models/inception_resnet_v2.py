"""Inception-ResNet-v2, as MXNet builds it (example/image-classification/symbols/inception-resnet-v2.py), after Szegedy,
Ioffe and Vanhoucke, "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning", 2016.

Differences from the paper are MXNet's: the stem is that of Inception-v3 with a first block of 320 channels; the blocks
have 1,088 and 2,080 channels instead of 1,154 and 2,048; the 17x17 blocks have 129 channels inside instead of 128, and
pad unevenly, 1x7 convolutions by (1, 2) and 7x1 ones by (2, 1), so that height and width are out by 2 in between.
Convolutions have biases, and batch norms a fixed scale.

MXNet's file does not name the layers; the names here are those that MXNet generates in a new process.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from dmltrain.layers import (
    MXNET_EPSILON,
    AvgPool,
    BatchNorm,
    Chain,
    Concat,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Layer,
    MaxPool,
    Network,
    Relu,
    Scale,
    add,
    chain,
    concat,
)
from dmltrain.models.architecture import Architecture

Unit = tuple[int, int | tuple[int, int], int, int | tuple[int, int]]  # channels, kernel, stride, pad


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    blocks = _Blocks()
    root = chain(
        *blocks.stem(),
        *(blocks.block35() for _ in range(10)),
        blocks.reduction(((384, 3, 2, 0),), ((256, 1, 1, 0), (256, 3, 1, 1), (384, 3, 2, 0))),
        *(blocks.block17() for _ in range(20)),
        blocks.reduction(
            ((256, 1, 1, 0), (384, 3, 2, 0)),
            ((256, 1, 1, 0), (288, 3, 2, 0)),
            ((256, 1, 1, 0), (288, 3, 1, 1), (320, 3, 2, 0)),
        ),
        *(blocks.block8(0.2) for _ in range(9)),
        blocks.block8(1.0, relu=False),
        blocks.units((1536, 1, 1, 0)),
        GlobalAvgPool(),
        Flatten(),
        Dropout(rate=0.2),
        Dense("fullyconnected0", num_classes),
    )
    return Network("inception-resnet-v2", root, image_shape, num_classes)


class _Blocks:
    """Makes blocks in forward order, and numbers their convolutions and ReLUs."""

    def __init__(self) -> None:
        self._convolutions, self._relus = count(), count()

    def stem(self) -> tuple[Layer, ...]:
        """From 299x299 pixels to 320 channels of 35x35."""
        return (
            self.units((32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1)),
            MaxPool(kernel=3, stride=2),
            self.units((80, 1, 1, 0), (192, 3, 1, 0)),
            MaxPool(kernel=3, stride=2),
            concat(
                self.units((96, 1, 1, 0)),
                self.units((48, 1, 1, 0), (64, 5, 1, 2)),
                self.units((64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 1, 1)),
                chain(AvgPool(kernel=3, pad=1), self.units((64, 1, 1, 0))),
            ),
        )

    def block35(self) -> Chain:
        branches = (
            ((32, 1, 1, 0),),
            ((32, 1, 1, 0), (32, 3, 1, 1)),
            ((32, 1, 1, 0), (48, 3, 1, 1), (64, 3, 1, 1)),
        )
        return self._residual(branches, 320, 0.17)

    def block17(self) -> Chain:
        branches = ((192, 1, 1, 0),), ((129, 1, 1, 0), (160, (1, 7), 1, (1, 2)), (192, (7, 1), 1, (2, 1)))
        return self._residual(branches, 1088, 0.1)

    def block8(self, scale: float, relu: bool = True) -> Chain:
        branches = ((192, 1, 1, 0),), ((192, 1, 1, 0), (224, (1, 3), 1, (0, 1)), (256, (3, 1), 1, (1, 0)))
        return self._residual(branches, 2080, scale, relu)

    def reduction(self, *branches: tuple[Unit, ...]) -> Concat:
        """Halves height and width."""
        return concat(*(self.units(*branch) for branch in branches), MaxPool(kernel=3, stride=2))

    def units(self, *units: Unit) -> Chain:
        """Convolutions with batch norm and ReLU, in sequence."""
        return chain(*(layer for unit in units for layer in (*self._normed(unit), self._relu())))

    def _residual(self, branches: Iterable[tuple[Unit, ...]], channels: int, scale: float, relu: bool = True) -> Chain:
        """The input plus `scale` times what the branches make of it."""
        joined = concat(*(self.units(*branch) for branch in branches))
        body = chain(joined, *self._normed((channels, 1, 1, 0)), Scale(factor=scale))
        return chain(add(chain(), body), *((self._relu(),) if relu else ()))

    def _normed(self, unit: Unit) -> tuple[Layer, Layer]:
        number, (channels, kernel, stride, pad) = next(self._convolutions), unit
        conv = Conv(f"convolution{number}", channels, kernel=kernel, stride=stride, pad=pad)
        return conv, BatchNorm(f"batchnorm{number}", epsilon=MXNET_EPSILON)

    def _relu(self) -> Relu:
        return Relu(f"activation{next(self._relus)}")


ARCHITECTURE = Architecture(build, image_shape=(3, 299, 299), num_classes=1000)
