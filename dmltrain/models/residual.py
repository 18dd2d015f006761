"""Depths and widths of MXNet's residual networks, resnet, resnet-v1 and resnext
(example/image-classification/symbols/resnet.py, resnet-v1.py, resnext.py).

Images up to 32 pixels high get a CIFAR network with three stages, larger ones an ImageNet network with four stages
after a 7x7 stem. (That is resnext.py's limit. In resnet.py and resnet-v1.py it is 28 pixels for the stages and 32 for
the stem: images from 29 to 32 pixels high get four stages without the stem there.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Chain, Constant, Conv, Layer, MaxPool, Relu, Rule, chain

SMALL_IMAGE = 32  # pixels of height, the most for a CIFAR network
CIFAR_DEPTHS = (20, 32, 44, 50, 56, 110, 164)  # the usual ones
IMAGENET_UNITS = {  # depth -> units per stage
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
    269: (3, 30, 48, 8),
}
DEPTHS = (
    f"50, also {', '.join(str(depth) for depth in IMAGENET_UNITS if depth != 50)}; for images up to {SMALL_IMAGE} "
    f"pixels high 110, also {', '.join(str(depth) for depth in CIFAR_DEPTHS if depth != 110)}"
)


ZERO_GAMMA = Rule(Constant(0.0))  # of a unit's last norm: the unit starts as its shortcut (Goyal et al. 2017, 5.1)


@dataclass(frozen=True)
class ResidualPlan:
    """What a depth means."""

    depth: int
    small: bool  # a CIFAR network
    units: tuple[int, ...]  # of each stage
    channels: tuple[int, ...]  # of the stem and of each stage
    bottleneck: bool  # units of three convolutions, not of two

    def stages(self, unit: Callable[[str, int, int, bool], Layer]) -> list[Layer]:
        """All units, made by `unit(name, channels, stride, first)`; the first of a stage needs a projection."""
        return [
            unit(f"stage{stage}_unit{number}", self.channels[stage], 2 if stage > 1 and number == 1 else 1, number == 1)
            for stage, count in enumerate(self.units, 1)
            for number in range(1, count + 1)
        ]


def plan(network: str, num_layers: int | None, image_shape: tuple[int, int, int]) -> ResidualPlan:
    """`num_layers` None means MXNet's default: 110 for CIFAR, 50 for ImageNet. Raises UserError for invalid depths."""
    small = image_shape[1] <= SMALL_IMAGE
    depth = num_layers if num_layers is not None else 110 if small else 50
    return _cifar(network, depth) if small else _imagenet(network, depth)


def _cifar(network: str, depth: int) -> ResidualPlan:
    if depth >= 164 and (depth - 2) % 9 == 0:
        return ResidualPlan(depth, True, ((depth - 2) // 9,) * 3, (16, 64, 128, 256), True)
    if 8 <= depth < 164 and (depth - 2) % 6 == 0:
        return ResidualPlan(depth, True, ((depth - 2) // 6,) * 3, (16, 16, 32, 64), False)
    usual = ", ".join(map(str, CIFAR_DEPTHS))
    valid = f"{usual} (also any other 6 n + 2 from 8 to 158 and any 9 n + 2 from 164)"
    raise UserError(f"no {network} of {depth} layers for images up to {SMALL_IMAGE} pixels high; valid depths: {valid}")


def _imagenet(network: str, depth: int) -> ResidualPlan:
    if depth not in IMAGENET_UNITS:
        valid = ", ".join(map(str, IMAGENET_UNITS))
        size = f"images over {SMALL_IMAGE} pixels high"
        raise UserError(f"no {network} of {depth} layers for {size}; valid depths: {valid}")
    bottleneck = depth >= 50
    channels = (64, 256, 512, 1024, 2048) if bottleneck else (64, 64, 128, 256, 512)
    return ResidualPlan(depth, False, IMAGENET_UNITS[depth], channels, bottleneck)


def imagenet_stem(channels: int) -> Chain:
    """7x7 with stride 2 and 3x3 pooling with stride 2: a quarter of height and width remains."""
    conv = Conv("conv0", channels, kernel=7, stride=2, pad=3, bias=False)
    return chain(conv, norm("bn0"), Relu("relu0"), MaxPool("pooling0", kernel=3, stride=2, pad=1))


def norm(name: str, gamma: Rule | None = None, epsilon: float = 2e-5) -> BatchNorm:
    """A batch norm with the constants of MXNet's residual networks."""
    return BatchNorm(name, epsilon=epsilon, momentum=0.9, fixed_scale=False, gamma_rule=gamma or Rule())


def conv(name: str, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> Conv:
    """Without bias, and padded so that stride 1 keeps height and width."""
    return Conv(name, channels, kernel=kernel, stride=stride, pad=kernel // 2, bias=False, groups=groups)


def normed(name: str, *convolutions: tuple[int, ...], zero_gamma: bool = False, epsilon: float = 2e-5) -> Chain:
    """The body of a unit whose ReLU comes after the addition: convolutions, each with a batch norm after it, and ReLUs
    between them. A convolution is what `conv` takes besides its name. `zero_gamma`: of the last norm."""
    layers: list[Layer] = []
    for number, convolution in enumerate(convolutions, 1):
        layers += [Relu(f"{name}_relu{number - 1}")] if number > 1 else []
        gamma = ZERO_GAMMA if zero_gamma and number == len(convolutions) else None
        layers += [conv(f"{name}_conv{number}", *convolution), norm(f"{name}_bn{number}", gamma, epsilon)]
    return chain(*layers)
