"""Caffe's GoogLeNet with its two auxiliary classifiers (BVLC's models/bvlc_googlenet/train_val.prototxt), after Szegedy
et al., "Going Deeper with Convolutions", 2014.

The auxiliary classifiers' losses count 0.3 times. With them there are 13,378,280 parameters, without them 6,998,552.
Weights start uniform by Xavier's rule, biases as 0.2 or, before a softmax, 0; biases learn at twice the rate and do not
decay. Names are Caffe's with "_" for "/", as MXNet's converter of Caffe's networks writes them.
"""

from __future__ import annotations

from dmltrain.layers import (
    Auxiliary,
    AvgPool,
    Chain,
    Concat,
    Conv,
    Dense,
    Dropout,
    Flatten,
    Layer,
    MaxPool,
    Network,
    Relu,
    chain,
    concat,
)
from dmltrain.models.architecture import Architecture
from dmltrain.models.caffe import XAVIER, bias, response_norm
from dmltrain.models.googlenet import STAGES

LOSS_AFTER = {"4a": "loss1", "4d": "loss2"}  # block -> auxiliary classifier
LOSS_WEIGHT = 0.3


def build(num_layers: int | None, num_classes: int, image_shape: tuple[int, int, int]) -> Network:
    layers: list[Layer] = [
        _unit("conv1_7x7_s2", 64, kernel=7, stride=2),
        _halved("pool1_3x3_s2"),
        response_norm("pool1_norm1"),
        _unit("conv2_3x3_reduce", 64),
        _unit("conv2_3x3", 192, kernel=3),
        response_norm("conv2_norm2"),
    ]
    for number, stage in enumerate(STAGES, 2):
        layers.append(_halved(f"pool{number}_3x3_s2"))
        for name, *channels in stage:
            block = name.removeprefix("in")
            layers.append(_inception(f"inception_{block}", *channels))
            if block in LOSS_AFTER:
                layers.append(_classifier(LOSS_AFTER[block], num_classes))
    head = (AvgPool("pool5_7x7_s1", kernel=7, rounding="full"), Flatten(), Dropout("pool5_drop_7x7_s1", rate=0.4))
    root = chain(*layers, *head, Dense("loss3_classifier", num_classes, bias_rule=bias(0.0)))
    return Network("caffe-googlenet", root, image_shape, num_classes, XAVIER)


def _unit(name: str, channels: int, kernel: int = 1, stride: int = 1) -> Chain:
    """Convolution and ReLU; stride 1 keeps height and width."""
    conv = Conv(name, channels, kernel=kernel, stride=stride, pad=kernel // 2, bias_rule=bias(0.2))
    return chain(conv, Relu(f"{name}_relu"))


def _halved(name: str) -> MaxPool:
    return MaxPool(name, kernel=3, stride=2, rounding="full")


def _inception(name: str, one: int, three_in: int, three: int, five_in: int, five: int, projection: int) -> Concat:
    pool = MaxPool(f"{name}_pool", kernel=3, pad=1, rounding="full")
    return concat(
        _unit(f"{name}_1x1", one),
        chain(_unit(f"{name}_3x3_reduce", three_in), _unit(f"{name}_3x3", three, kernel=3)),
        chain(_unit(f"{name}_5x5_reduce", five_in), _unit(f"{name}_5x5", five, kernel=5)),
        chain(pool, _unit(f"{name}_pool_proj", projection)),
        name=f"{name}_output",
    )


def _classifier(name: str, num_classes: int) -> Auxiliary:
    branch = chain(
        AvgPool(f"{name}_ave_pool", kernel=5, stride=3, rounding="full"),
        _unit(f"{name}_conv", 128),
        Flatten(),
        Dense(f"{name}_fc", 1024, bias_rule=bias(0.2)),
        Relu(f"{name}_relu_fc"),
        Dropout(f"{name}_drop_fc", rate=0.7),
        Dense(f"{name}_classifier", num_classes, bias_rule=bias(0.0)),
    )
    return Auxiliary(name, branch, LOSS_WEIGHT)


ARCHITECTURE = Architecture(build, image_shape=(3, 224, 224), num_classes=1000)
