"""The network of Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (airbench94).

The first layer whitens patches of 2x2 pixels: its weights are fixed, its bias learns. A row of `WHITENING` is
v / sqrt(e + 0.0005), (channel, row, column), where v and e are an eigenvector and its eigenvalue, the largest first, of
the mean of p p^T over all patches p of the first 5,000 training images, as dmltrain/data/cifar10.py normalises them.
The author's program computes these numbers when it starts; here they are the same in every run.

Convolutions start as the identity of their input's channels. Shifts of batch norms learn at 64 times the rate, and
decay as much as the other arrays.
"""

from __future__ import annotations

from dmltrain.layers import (
    BatchNorm,
    Conv,
    Dense,
    Dirac,
    Exactly,
    Flatten,
    Gelu,
    Layer,
    MaxPool,
    Network,
    Rule,
    Scale,
    ShapeError,
    Xavier,
    chain,
)
from dmltrain.models.architecture import Architecture

WIDTHS = (64, 256, 256)  # channels of the blocks
SHIFT = Rule(lr_mult=64.0, wd_mult=1 / 64)
DECAYING = Rule(wd_mult=1.0)
USUAL = Xavier("uniform", "in", 1)  # of torch's layers: kaiming_uniform_ with a = sqrt(5)
WHITENING = (
    (0.06947, 0.06947, 0.06907, 0.06906, 0.07352, 0.07351, 0.07287, 0.07285, 0.0757, 0.07569, 0.07501, 0.07498),
    (0.3103, 0.3102, 0.3126, 0.3121, 0.01729, 0.01708, 0.02112, 0.02065, -0.3073, -0.3073, -0.3019, -0.3021),
    (-0.379, -0.3733, 0.3566, 0.3626, -0.3643, -0.359, 0.3854, 0.3908, -0.3639, -0.359, 0.3571, 0.3621),
    (-0.3992, 0.4044, -0.4049, 0.3997, -0.408, 0.4156, -0.4137, 0.4089, -0.3915, 0.3966, -0.3972, 0.3898),
    (-0.3951, -0.3965, -0.4207, -0.4208, 0.7804, 0.7781, 0.7549, 0.7533, -0.3559, -0.358, -0.3816, -0.3825),
    (0.9869, -0.9823, -0.9738, 0.972, 0.9957, -0.9982, -1.002, 1.002, 0.9602, -0.9617, -0.9676, 0.9693),
    (-2.262, -2.206, 2.211, 2.276, 0.1715, 0.1616, -0.1675, -0.1728, 2.134, 2.069, -2.088, -2.144),
    (2.357, -2.427, 2.438, -2.371, -0.1588, 0.1625, -0.1466, 0.1464, -2.267, 2.329, -2.31, 2.247),
    (-2.28, -1.989, 1.988, 2.271, 4.933, 4.315, -4.318, -4.929, -2.8, -2.465, 2.453, 2.811),
    (2.131, -2.433, 2.44, -2.141, -4.521, 5.166, -5.147, 4.508, 2.533, -2.9, 2.906, -2.543),
    (6.614, -6.618, -6.618, 6.623, -0.3267, 0.3418, 0.3343, -0.3496, -6.361, 6.353, 6.376, -6.367),
    (-5.2, 5.19, 5.192, -5.186, 10.85, -10.84, -10.86, 10.86, -5.97, 5.973, 5.977, -5.983),
)


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    if image_shape[0] != 3:
        raise ShapeError("its first layer whitens red, green and blue: expected 3 channels")
    blocks = [layer for number, width in enumerate(WIDTHS, 1) for layer in _block(f"block{number}", width)]
    head = (
        MaxPool("pool", kernel=3, stride=3),
        Flatten(),
        Dense("fc1", num_classes, bias=False, weight_rule=Rule(USUAL)),
        Scale("scaled", 1 / 9),
    )
    root = chain(_whitening(), Gelu("gelu0"), *blocks, *head)
    return Network("airbench94", root, image_shape, num_classes, Dirac(USUAL))


def _whitening() -> Conv:
    """Each eigenvector, and then the negative of each."""
    values = tuple(sign * value for sign in (1, -1) for row in WHITENING for value in row)
    fixed = Rule(Exactly(values), lr_mult=0.0, wd_mult=0.0)
    return Conv("conv0", 2 * len(WHITENING), kernel=2, weight_rule=fixed, bias_rule=DECAYING)


def _block(name: str, channels: int) -> tuple[Layer, ...]:
    return (
        _conv(f"{name}_conv1", channels),
        MaxPool(f"{name}_pool", kernel=2, stride=2),
        *_norm(f"{name}_bn1", f"{name}_gelu1"),
        _conv(f"{name}_conv2", channels),
        *_norm(f"{name}_bn2", f"{name}_gelu2"),
    )


def _conv(name: str, channels: int) -> Conv:
    return Conv(name, channels, kernel=3, pad=1, bias=False)


def _norm(norm: str, gelu: str) -> tuple[Layer, Layer]:
    return BatchNorm(norm, epsilon=1e-12, momentum=0.6, fixed_scale=True, beta_rule=SHIFT), Gelu(gelu)


ARCHITECTURE = Architecture(build, image_shape=(3, 32, 32), num_classes=10)
