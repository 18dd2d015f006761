"""MobileNetV2 with ReLU6, as MXNet builds it (example/image-classification/symbols/mobilenetv2.py), after Sandler,
Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018.

`multiplier` multiplies the numbers of channels, that of the last convolution only above 1. Unlike the paper's, the
first block also has an expanding convolution (of factor 1), which adds 1,088 parameters.
"""

from __future__ import annotations

from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Chain, Clip, Conv, Dense, Flatten, GlobalAvgPool, Layer, Network, add, chain
from dmltrain.models.architecture import Architecture

STEM = 32  # channels
SMALLEST = 0.05  # multiplier that leaves every layer a channel
LAST = 1280  # channels before the pooling
# (expansion, channels, blocks, stride of the first block) of each sequence
SEQUENCES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def build(
    num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int], *, multiplier: float = 1.0
) -> Network:
    if not SMALLEST <= multiplier < float("inf"):
        raise UserError(f"network mobilenetv2 needs a multiplier of at least {SMALLEST}, found {multiplier}")
    channels = round(STEM * multiplier)
    layers: list[Layer] = [_unit("first-3x3-conv", channels, kernel=3, stride=2)]
    for number, (expansion, usual, count, stride) in enumerate(SEQUENCES):
        for block in range(count):
            after = round(usual * multiplier)
            body = _block(f"seq-{number}-block{block}", channels, expansion, after, 1 if block else stride)
            layers.append(add(chain(), body, name=f"seq-{number}-block{block}-shortcut") if block else body)
            channels = after
    head = (
        _unit("last-1x1-conv", int(LAST * max(multiplier, 1.0))),
        GlobalAvgPool("global_pool"),
        Flatten("flatten"),
        Dense("fc", num_classes),
    )
    return Network("mobilenetv2", chain(*layers, *head), image_shape, num_classes)


def _block(name: str, channels: int, expansion: int, after: int, stride: int) -> Chain:
    """An inverted residual: wider, one filter for each channel, narrower again without ReLU6."""
    inner = channels * expansion
    depthwise = _unit(f"{name}-depthwise", inner, kernel=3, stride=stride, groups=inner)
    return chain(_unit(f"{name}-exp", inner), depthwise, _unit(f"{name}-linear", after, clipped=False))


def _unit(name: str, channels: int, kernel: int = 1, stride: int = 1, groups: int = 1, clipped: bool = True) -> Chain:
    conv = Conv(f"{name}-conv2d", channels, kernel=kernel, stride=stride, pad=kernel // 2, bias=False, groups=groups)
    norm = BatchNorm(f"{name}-batchnorm", epsilon=1e-5, fixed_scale=False)
    return chain(conv, norm, Clip(f"{name}-relu6")) if clipped else chain(conv, norm)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
