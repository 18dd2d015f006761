"""EfficientNet-B0, as torchvision builds it, after Tan and Le, "EfficientNet: Rethinking Model Scaling for
Convolutional Neural Networks", 2019.

`stochastic_depth` is the probability to skip a block at the end; block l of L, from 0, is skipped with l / L of it.
First weights are those of the authors' program.
"""

from __future__ import annotations

from math import sqrt

from dmltrain.layers import (
    HE,
    BatchNorm,
    Chain,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Layer,
    Network,
    Rule,
    Silu,
    Uniform,
    Xavier,
    add,
    chain,
)
from dmltrain.models.architecture import Architecture
from dmltrain.models.skips import check, skipped
from dmltrain.models.squeeze import squeeze

STEM, LAST = 32, 1280  # channels
STAGES = (  # (expansion, kernel, stride of the first block, channels, blocks)
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
BLOCKS = sum(blocks for *_, blocks in STAGES)
DROPOUT, SKIPS = 0.2, 0.2  # the published rates


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, stochastic_depth: float = SKIPS
) -> Network:
    """Raises UserError for invalid probabilities."""
    check("efficientnet-b0", stochastic_depth)
    layers: list[Layer] = [*_unit("conv0", STEM, 3, 2), Silu("silu0")]
    channels, number = STEM, 0
    for stage, (expansion, kernel, first_stride, after, blocks) in enumerate(STAGES, 1):
        for block in range(1, blocks + 1):
            name, stride = f"stage{stage}_block{block}", first_stride if block == 1 else 1
            body = _block(name, channels, channels * expansion, after, kernel, stride)
            rate = stochastic_depth * number / BLOCKS
            layers.append(add(skipped(name, rate, body), chain(), name=f"{name}_add") if block > 1 else body)
            channels, number = after, number + 1
    head = (GlobalAvgPool("pool1"), Flatten(), Dropout("dropout1", DROPOUT))
    classes = Dense("fc1", num_classes, weight_rule=Rule(Uniform(1 / sqrt(num_classes))))
    root = chain(*layers, *_unit("conv1", LAST), Silu("silu1"), *head, classes)
    return Network("efficientnet-b0", root, image_shape, num_classes, Xavier("gaussian", "out", 2))


def _block(name: str, channels: int, inner: int, after: int, kernel: int, stride: int) -> Chain:
    """Wider, one filter for each channel, squeeze-and-excitation, and narrower again without an activation."""
    wider = (*_unit(f"{name}_expand", inner), Silu(f"{name}_expand_silu")) if inner != channels else ()
    depthwise = (*_unit(f"{name}_depthwise", inner, kernel, stride, inner), Silu(f"{name}_depthwise_silu"))
    gate = squeeze(name, inner, max(1, channels // 4), Silu(f"{name}_se_silu"))
    return chain(*wider, *depthwise, gate, *_unit(f"{name}_project", after))


def _unit(name: str, channels: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> tuple[Layer, Layer]:
    """Convolution and batch norm. A filter of one channel starts by the number of its inputs."""
    rule = Rule(HE) if groups > 1 else Rule()
    convolution = Conv(
        name, channels, kernel=kernel, stride=stride, pad=kernel // 2, bias=False, groups=groups, weight_rule=rule
    )
    return convolution, BatchNorm(f"{name}_bn", epsilon=1e-5, fixed_scale=False)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
