"""ConvNeXt-T, as torchvision builds it, after Liu et al., "A ConvNet for the 2020s", 2022.

`stochastic_depth` is the probability to skip the last block; block l of L, from 0, is skipped with l / (L - 1) of it.
The linear layers of a block are convolutions of 1x1, and its layer scale is one of a channel each, without decay.
"""

from __future__ import annotations

from dmltrain.layers import (
    Add,
    Constant,
    Conv,
    Dense,
    Flatten,
    Gelu,
    GlobalAvgPool,
    Layer,
    LayerNorm,
    Network,
    Normal,
    Rule,
    add,
    chain,
)
from dmltrain.models.architecture import Architecture
from dmltrain.models.skips import check, skipped

STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))  # channels, blocks
LAST = sum(blocks for _, blocks in STAGES) - 1  # number of the last block
SKIPS = 0.1  # the published rate
LAYER_SCALE = Rule(Constant(1e-6), wd_mult=0.0)


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, stochastic_depth: float = SKIPS
) -> Network:
    """Raises UserError for invalid probabilities."""
    check("convnext-t", stochastic_depth)
    layers: list[Layer] = []
    number = 0
    for stage, (channels, blocks) in enumerate(STAGES):
        layers += _smaller(stage, channels)
        for block in range(1, blocks + 1):
            layers.append(_block(f"stage{stage + 1}_block{block}", channels, stochastic_depth * number / LAST))
            number += 1
    head = (GlobalAvgPool("pool1"), _norm("norm1"), Flatten(), Dense("fc1", num_classes))
    return Network("convnext-t", chain(*layers, *head), image_shape, num_classes, Normal(0.02))


def _smaller(stage: int, channels: int) -> tuple[Layer, Layer]:
    """The stem, or what halves height and width before a later stage."""
    if stage == 0:
        return Conv("conv0", channels, kernel=4, stride=4), _norm("norm0")
    name = f"stage{stage + 1}"
    return _norm(f"{name}_norm"), Conv(f"{name}_conv", channels, kernel=2, stride=2)


def _block(name: str, channels: int, rate: float) -> Add:
    body = (
        Conv(f"{name}_conv", channels, kernel=7, pad=3, groups=channels),
        _norm(f"{name}_norm"),
        Conv(f"{name}_fc1", 4 * channels),
        Gelu(f"{name}_gelu"),
        Conv(f"{name}_fc2", channels),
        Conv(f"{name}_scale", channels, bias=False, groups=channels, weight_rule=LAYER_SCALE),
    )
    return add(skipped(name, rate, *body), chain(), name=f"{name}_add")


def _norm(name: str) -> LayerNorm:
    return LayerNorm(name, epsilon=1e-6)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
